"""Comparing two transcripts of the same plan: direct, and through mcpx.

What may differ is named here and nowhere else: ids, times, the one random
thing that the reference server says, and the moment of what nobody asked for.
"""
import base64
import binascii
import json
import re

# Fields that hold an id or a time, wherever they stand.
VOLATILE_FIELDS = ("taskId", "progressToken", "createdAt", "lastUpdatedAt", "elicitationId")

VOLATILE_TEXT = [
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?"), "<time>"),
    (re.compile(r"\d{1,2}:\d\d:\d\d(\s[AP]M)?"), "<time>"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "<id>"),
    (re.compile(r"(Task created: )\S+"), r"\1<id>"),
    # toggle-simulated-logging draws one of eight messages.
    (re.compile(r"^(\w+-level message|Alert level-message)$"), "<some level> message"),
]

# What mcpx puts into the environment of a child, by contract.
MCPX_VARIABLE = re.compile(r"^MCPX_")


def plain(value):
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        if isinstance(value.get("blob"), str):  # elsewhere it may be a property in a schema
            value = dict(value, blob=plain_blob(value["blob"]))
        shown = {key: "<%s>" % key if key in VOLATILE_FIELDS else plain(item) for key, item in value.items()}
        if shown.get("_meta") == {}:
            del shown["_meta"]  # says nothing
        return shown
    if isinstance(value, list):
        return [plain(item) for item in value]
    return plain_text(value) if isinstance(value, str) else value


def plain_text(text):
    environment = parsed_environment(text)
    if environment is not None:
        return environment
    for pattern, replacement in VOLATILE_TEXT:
        text = pattern.sub(replacement, text)
    return text


def parsed_environment(text):
    """The variables that get-env shows, without mcpx's own; None for any other text."""
    if not text.startswith('{\n  "'):
        return None
    try:
        variables = json.loads(text)
    except ValueError:
        return None
    return {name: value for name, value in variables.items() if not MCPX_VARIABLE.match(name)}


def plain_blob(blob):
    """A blob that is a text with the time in it, without the time."""
    try:
        return plain_text(base64.b64decode(blob).decode())
    except (binascii.Error, UnicodeDecodeError):
        return blob


def plain_greeting(greeting):
    """The answer to initialize; mcpx has changes of its own to announce, so it says so for all lists."""
    capabilities = {
        name: {field: item for field, item in value.items() if field != "listChanged"}
        for name, value in greeting["capabilities"].items()
    }
    return dict(greeting, capabilities=capabilities)


def plain_message(message):
    """A message that was heard: no envelope, no ids, no random log level."""
    shown = plain({key: message[key] for key in ("method", "params") if key in message})
    if (shown.get("params") or {}).get("data") == "<some level> message":
        shown["params"]["level"] = "<some level>"
    # SDKs write "no params" in two ways.
    if shown.get("params") == {}:
        del shown["params"]
    return shown


def is_unsolicited(message):
    """Sent when the server starts or on a timer, so in no particular step."""
    method = message["method"]
    if method == "roots/list" or method.endswith("/list_changed"):
        return True
    data = (message.get("params") or {}).get("data")
    return method == "notifications/message" and isinstance(data, str) and data.startswith("Roots updated")


def distinct(messages):
    """Messages as a sorted list of different JSON texts."""
    return sorted({json.dumps(plain_message(message), sort_keys=True) for message in messages})


def differences(steps, direct, bridged):
    """What the two transcripts do not agree on, as lines for a person.

    What came in during a wait belongs to the step before it: whether a message
    is sent just before or just after an answer is nobody's promise.
    """
    found = compare("initialize", *(plain_greeting(one["initialize"]) for one in (direct, bridged)))
    for number, (step, *records) in enumerate(zip(steps, direct["steps"], bridged["steps"])):
        name = "step %d %s" % (number, describe(step))
        found += compare(name, *(plain_outcome(step, record) for record in records))
        if "wait" not in step:
            waits = number + 1 < len(steps) and "wait" in steps[number + 1]
            upto = number + 2 if waits else number + 1
            heard = [heard_in(transcript["steps"][number:upto]) for transcript in (direct, bridged)]
            found += compare(name + ", heard meanwhile", *heard)
    return found + compare_unsolicited(direct["all"], bridged["all"])


def plain_outcome(step, record):
    """The result or error of a step."""
    outcome = {key: plain(record[key]) for key in ("result", "error") if key in record}
    if step.get("method") == "tasks/get" and "error" in outcome:
        # Task ids are mcpx's own toward a host, and so are its words about unknown ones.
        outcome["error"] = {"code": outcome["error"].get("code")}
    return outcome


def heard_in(records):
    return [plain_message(m) for record in records for m in record["heard"] if not is_unsolicited(m)]


def compare_unsolicited(direct, bridged):
    """Over the whole run each kind must have been heard here if it was there.

    mcpx may announce changed lists of its own accord (its cache was out of
    date), so more list_changed than on a direct connection is no difference.
    """
    one, two = (distinct(filter(is_unsolicited, messages)) for messages in (direct, bridged))
    lost = ["only heard directly: %s" % text for text in one if text not in two and "tools/list_changed" not in text]
    extra = ["only heard through mcpx: %s" % text for text in two if text not in one and "list_changed" not in text]
    return lost + extra


def describe(step):
    if "wait" in step:
        return "wait for %s" % step["wait"]
    params = step.get("task") or step.get("params") or {}
    what = params.get("name") or params.get("uri") or (params.get("ref") or {}).get("name") or ""
    return " ".join(part for part in (step["method"], "as a task" if "task" in step else "", what) if part)


def compare(name, direct, bridged):
    """One line per place where two values differ."""
    return ["%s: %s" % (name, line) for line in _walk("", direct, bridged)]


def _walk(path, direct, bridged):
    if isinstance(direct, dict) and isinstance(bridged, dict):
        for key in list(direct) + [key for key in bridged if key not in direct]:
            where = "%s.%s" % (path, key)
            if key not in bridged:
                yield "%s is missing (directly: %s)" % (where, short(direct[key]))
            elif key not in direct:
                yield "%s is new: %s" % (where, short(bridged[key]))
            else:
                yield from _walk(where, direct[key], bridged[key])
    elif isinstance(direct, list) and isinstance(bridged, list) and len(direct) == len(bridged):
        for index, (one, two) in enumerate(zip(direct, bridged)):
            yield from _walk("%s[%d]" % (path, index), one, two)
    elif isinstance(direct, list) and isinstance(bridged, list):
        yield from _unmatched(path, direct, bridged)
    elif direct != bridged:
        yield "%s directly %s, through mcpx %s" % (path, short(direct), short(bridged))


def _unmatched(path, direct, bridged):
    """Two lists of different length: the items that the other one has not."""
    for item in direct:
        if item not in bridged:
            yield "%s lacks %s" % (path, short(item))
    for item in bridged:
        if item not in direct:
            yield "%s has in addition %s" % (path, short(item))
    if all(item in bridged for item in direct) and all(item in direct for item in bridged):
        yield "%s has %d items, directly %d" % (path, len(bridged), len(direct))


def short(value, limit=300):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[:limit] + "…"
