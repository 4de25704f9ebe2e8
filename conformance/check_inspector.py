"""The MCP inspector's command line as a host, over stdio and over HTTP."""
import json
import subprocess

import install
from check_upstreams import node_entry
from door import open_door
from place import Failed, expect

LIMIT_S = 60
SERVER = "everything"  # its name in the config
SESSION = "inspector"


def inspect(place, target, *arguments):
    """Run one inspector method against a target; returns the result it prints."""
    try:
        done = subprocess.run(
            install.inspector_command() + ["--cli"] + target + list(arguments),
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


def look_around(place, target):
    """Lists, a call, a prompt and a read; all of it has to be what the server says."""
    listed = {
        "tools": ("tools/list", "echo"),
        "prompts": ("prompts/list", "args-prompt"),
        "resources": ("resources/list", "features.md"),
        "resourceTemplates": ("resources/templates/list", "Dynamic Text Resource"),
    }
    for key, (method, name) in listed.items():
        names = [one["name"] for one in inspect(place, target, "--method", method)[key]]
        expect(name in names, "%s lists %s", method, names)
    called = inspect(
        place, target, "--method", "tools/call", "--tool-name", "echo", "--tool-arg", "message=from the inspector"
    )
    expect(called["content"][0]["text"] == "Echo: from the inspector", "tools/call: %s", called)
    words = ["--method", "prompts/get", "--prompt-name", "args-prompt", "--prompt-args", "city=Lima"]
    got = inspect(place, target, *words)
    expect("Lima" in got["messages"][0]["content"]["text"], "prompts/get: %s", got)
    uri = "demo://resource/static/document/features.md"
    read = inspect(place, target, "--method", "resources/read", "--uri", uri)
    expect(read["contents"][0]["uri"] == uri, "resources/read: %s", str(read)[:300])


def check_inspector(place):
    place.configure({SERVER: node_entry("server-everything")})
    # It launches servers with a short list of variables; ours have to be named.
    named = ["%s=%s" % (key, path) for key, path in place.dirs.items()]
    look_around(place, place.mcpx("serve", SERVER) + [word for pair in named for word in ("-e", pair)])


def check_inspector_http(place):
    with open_door(place, {SERVER: node_entry("server-everything")}) as url:
        # Each of its runs is a connection of its own; the name makes one session of them.
        look_around(place, [url + SERVER, "--transport", "http", "--header", "Mcpx-Session: " + SESSION])
        keys = [one["key"] for one in place.status()["instances"]]
    expect(keys.count("session:" + SESSION) == 1, "the instances are for %s", keys)
