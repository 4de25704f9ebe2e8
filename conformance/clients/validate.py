"""Validate values against definitions of a JSON schema, with the jsonschema package.

usage: python validate.py < {"schema": S, "definitions": "$defs", "items": [[NAME, VALUE], ...]} > [[problem, ...], ...]
"""
import base64
import json
import re
import sys

from jsonschema import FormatChecker, validators

formats = FormatChecker(formats=())


@formats.checks("byte", raises=ValueError)
def is_base64(value):
    return not isinstance(value, str) or base64.b64decode(value, validate=True) is not None


@formats.checks("uri")
def is_uri(value):
    return not isinstance(value, str) or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value) is not None


def innermost(error):
    """Of an anyOf's branches, a complaint of the one that was meant."""
    while error.context:
        branches = {}
        for one in error.context:
            branches.setdefault(one.schema_path[0], []).append(one)
        error = min(branches.values(), key=distance)[0]
    return error


def distance(complaints):
    """How far a value is from a branch; far if even its `type` is another's."""
    wrong_kind = any(one.validator in ("const", "enum") and list(one.path)[-1:] == ["type"] for one in complaints)
    return wrong_kind, len(complaints)


def problems(validator, value):
    found = []
    for error in validator.iter_errors(value):
        inner = innermost(error)
        where = "".join("[%d]" % step if isinstance(step, int) else ".%s" % step for step in inner.absolute_path)
        found.append("%s: %s" % (where or "(top)", inner.message[:240]))
    return found


def main():
    job = json.load(sys.stdin)
    schema = job["schema"]
    kind = validators.validator_for(schema)
    cache = {}
    answers = []
    for name, value in job["items"]:
        if name not in cache:
            root = dict(schema, **{"$ref": "#/%s/%s" % (job["definitions"], name)})
            cache[name] = kind(root, format_checker=formats)
        answers.append(problems(cache[name], value))
    json.dump(answers, sys.stdout)


main()
