"""opencode, headless, with a scripted model and its MCP servers behind mcpx.

Facts used here, measured with the pinned release: the bundled provider
"@ai-sdk/openai-compatible" works offline; `run --format json` prints an event a
line; `serve` prints its address; an MCP server SERVER's tool TOOL is called
SERVER_TOOL.
"""
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request

import fake_model
import install
from place import Failed, expect, wait_until

RUN_LIMIT_S = 120

# Everything that would go to the network by itself.
QUIET = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}


def settings(place, model_url, servers):
    """An opencode configuration with one fake model and these servers through mcpx."""
    model = {"name": "scripted", "tool_call": True, "limit": {"context": 100000, "output": 4000}}
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": "fake/scripted",
        "small_model": "fake/scripted",
        "provider": {
            "fake": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "fake",
                "options": {"baseURL": model_url, "apiKey": "none"},
                "models": {"scripted": model},
            }
        },
        "mcp": {name: {"type": "local", "command": place.mcpx("serve", name), "enabled": True} for name in servers},
    }


class Opencode:
    """One opencode process in a place; several may share a place."""

    def __init__(self, place, model, servers, name="opencode"):
        self.place = place
        self.model = model
        self.base = place.root / name
        self.base.mkdir()
        self.project = self.base / "project"
        self.project.mkdir()
        config = self.base / "opencode.json"
        config.write_text(json.dumps(settings(place, model.url, servers)))
        # Its own data directory: two processes at once would share a database.
        self.env = place.env(OPENCODE_CONFIG=str(config), XDG_DATA_HOME=str(self.base / "data"), **QUIET)
        self.process = None
        self.url = None

    def start(self, *arguments):
        with open(str(self.base / "out"), "wb") as out, open(str(self.base / "err"), "wb") as err:
            self.process = subprocess.Popen(
                [install.opencode_binary()] + list(arguments),
                cwd=str(self.project),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # a signal to us must not reach it, nor the other way
            )
        return self

    def output(self):
        return (self.base / "out").read_text(errors="replace")

    def complaint(self):
        return (self.base / "err").read_text(errors="replace")[-1500:]

    # --- opencode run -------------------------------------------------------

    def start_run(self, turns):
        return self.start("run", "--format", "json", "--model", "fake/scripted", fake_model.prompt(turns))

    def finish_run(self):
        """Wait for the run to end; returns what the tools returned, as the model saw it."""
        try:
            status = self.process.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired as late:
            raise Failed("opencode run did not end within %d s: %s" % (RUN_LIMIT_S, self.complaint())) from late
        expect(status == 0, "opencode run ended with %s: %s", status, self.complaint())
        return outputs(said(self.output()))

    # --- opencode serve -----------------------------------------------------

    def start_serve(self):
        self.start("serve", "--port", "0", "--hostname", "127.0.0.1", "--print-logs")
        pattern = re.compile(r"http://127\.0\.0\.1:\d+")

        def address():
            found = pattern.search(self.output() + (self.base / "err").read_text(errors="replace"))
            return found and found.group(0)

        self.url = wait_until(address, 40, "opencode serve says where it listens")
        return self

    def api(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=RUN_LIMIT_S) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.URLError as error:
            raise Failed("opencode %s %s: %s" % (method, path, error)) from error

    def new_session(self):
        return self.api("POST", "/session", {})["id"]

    def play(self, session, turns):
        """Let a session of `serve` play turns; returns what the tools returned."""
        body = {
            "model": {"providerID": "fake", "modelID": "scripted"},
            "parts": [{"type": "text", "text": fake_model.prompt(turns)}],
        }
        reply = self.api("POST", "/session/%s/message" % session, body)
        return outputs("".join(part.get("text", "") for part in reply["parts"] if part.get("type") == "text"))

    # --- the end ------------------------------------------------------------

    def stop(self, signum=signal.SIGTERM):
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signum)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def said(stream):
    """The assistant's text in the event lines of `run --format json`."""
    texts = []
    for line in stream.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("type") == "text":
            texts.append(event["part"].get("text", ""))
    return "".join(texts)


def outputs(text):
    """What the tools returned, out of the model's last words."""
    found = re.search(r"DONE (\[.*\])", text, re.DOTALL)
    expect(found, "the conversation did not come to its end: %r", text[-300:])
    return json.loads(found.group(1))
