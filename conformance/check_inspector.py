"""The MCP inspector's command line as a host."""
import json
import subprocess

import install
from check_upstreams import node_entry
from place import Failed, expect

LIMIT_S = 60


def inspect(place, server, *arguments):
    """Run one inspector method against a server; returns the result it prints."""
    # It launches servers with a short list of variables; ours have to be named.
    named = ["%s=%s" % (key, path) for key, path in place.dirs.items()]
    options = [word for pair in named for word in ("-e", pair)] + list(arguments)
    argv = install.inspector_command() + ["--cli"] + place.mcpx("serve", server) + options
    try:
        done = subprocess.run(
            argv,
            cwd=str(place.work),
            env=place.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise Failed("the inspector did not end within %d s" % LIMIT_S) from late
    text = done.stdout.decode(errors="replace")
    expect(done.returncode == 0, "the inspector failed: %s", (done.stderr.decode(errors="replace") or text)[-600:])
    return json.loads(text[text.index("{") :])


def check_inspector(place):
    place.configure({"everything": node_entry("server-everything")})
    listed = {
        "tools": ("tools/list", "echo"),
        "prompts": ("prompts/list", "args-prompt"),
        "resources": ("resources/list", "features.md"),
    }
    for key, (method, name) in listed.items():
        names = [one["name"] for one in inspect(place, "everything", "--method", method)[key]]
        expect(name in names, "%s lists %s", method, names)
    called = inspect(
        place, "everything", "--method", "tools/call", "--tool-name", "echo", "--tool-arg", "message=from the inspector"
    )
    expect(called["content"][0]["text"] == "Echo: from the inspector", "tools/call: %s", called)
    uri = "demo://resource/static/document/features.md"
    read = inspect(place, "everything", "--method", "resources/read", "--uri", uri)
    expect(read["contents"][0]["uri"] == uri, "resources/read: %s", str(read)[:300])
