"""What each caller must see, for `faults.py`: calls, whose state they may meet, and which answers are allowed.

A fault does harm to some calls: those that were under way where it struck, and those that came before it was over. A
call that no harm has touched must have its own right answer, once. One that was touched may have an honest error
instead. Nothing ever excuses a wrong answer, an answer to somebody else, or a side effect that happens twice.
"""

import json
import time
import zlib

SCOPES = {"glob": "global", "excl": "global", "sess": "session", "dir": "cwd", "proc": "pid"}

# Tools whose call may be carried out a second time when its answer was lost: their hints say so.
REPEATABLE = ("look", "keep", "watch", "fat", "dielook")

# Codes that a request gets which arrived damaged (JSON-RPC 2.0, section 5.1).
DAMAGED_CODES = (-32700, -32600)
RESTARTED = "dev.mcpx/restarted"


def genuine(text):
    """A label or owner with its checksum (see faults_upstream.py)."""
    return "%s~%08x" % (text, zlib.crc32(text.encode("utf-8", "replace")))


def is_lost(error):
    """The mark is what counts, never the words (DESIGN: -32000 with mcpxStreamLost)."""
    return error.get("code") == -32000 and (error.get("data") or {}).get("mcpxStreamLost") is True


class Call:
    """One request and all that happened to it."""

    def __init__(self, label, host, server, tool, owner, arguments):
        self.label, self.host, self.server, self.tool, self.owner, self.arguments = (
            label,
            host,
            server,
            tool,
            owner,
            arguments,
        )
        self.began = time.monotonic()
        self.ids = []  # of the request and, where questions travel in results, of its repetitions
        self.answers = []
        self.harms = set()  # kinds of faults that may have touched it
        self.copies = 1
        self.arrived = True  # whether the request reached mcpx as it was sent
        self.written = False
        self.void = None  # why nobody waits for an answer any more
        self.cancelled = False
        self.progress = 0
        self.session_named = None

    @property
    def settled(self):
        """Is there nothing more to wait for?"""
        return bool(self.void or self.answers)

    def harm(self, kind):
        if not self.settled:
            self.harms.add(kind)

    # -- verdicts -------------------------------------------------------------

    def on_answer(self, message):
        """Take an answer; returns what is wrong with it, or None."""
        self.answers.append(message)
        if len(self.answers) > self.copies:
            return "%d answers" % len(self.answers)
        if "error" in message:
            return self._wrong_error(message["error"])
        return self._wrong_result(message.get("result"))

    def _wrong_error(self, error):
        code, text = error.get("code"), error.get("message")
        if not isinstance(text, str) or not text:
            return "an error without words: %s" % json.dumps(error)
        if not self.arrived or self.copies > 1:
            # What arrives damaged is refused; what arrives twice is refused once, where the first is in flight.
            if code in DAMAGED_CODES:
                return None
        if self.server == "excl" and "queueTimeout" in text:
            return None  # those in front may have lost their answers, and hold it until they are given up
        if not self.harms:
            return "an error without any fault: %s" % json.dumps(error)[:400]
        if is_lost(error) or code in (-32000, -32603):
            return None
        return "an error that no fault excuses (%s): %s" % (sorted(self.harms), json.dumps(error)[:400])

    def _wrong_result(self, result):
        if not self.arrived:
            return "a result of a request that did not arrive: %s" % json.dumps(result)[:300]
        try:
            facts = json.loads(result["content"][0]["text"])
        except (KeyError, IndexError, TypeError, ValueError):
            return "a result that its tool does not give: %s" % json.dumps(result)[:300]
        if facts.get("label") != self.label:
            return "the answer to %s" % facts.get("label")
        if facts["server"] != self.server:
            return "an answer of server %s" % facts["server"]
        if facts["served"] != [self.owner]:
            return "a server that has served %s, its own key is %s" % (facts["served"], self.owner)
        if SCOPES[self.server] == "cwd" and not self.owner.startswith(genuine_prefix(facts["cwd"])):
            return "a server that works in %s" % facts["cwd"]
        if self.server == "excl" and facts["most"] > 1:
            return "an exclusive server that did %d calls at a time" % facts["most"]
        pad = self.arguments.get("pad") or ""
        if facts["pad"] != [len(pad), zlib.crc32(pad.encode())]:
            return "arguments that changed on the way: %s" % facts["pad"]
        if "body" in facts and zlib.crc32(facts["body"].encode()) != facts["check"]:
            return "a result that changed on the way"
        action = facts.get("action")
        if action and action.get("action") == "accept" and action.get("content") != {"answer": self.label}:
            return "what somebody else answered: %s" % action
        return self._wrong_silence(facts, result)

    def _wrong_silence(self, facts, result):
        """State is not lost in silence: another process answers than before, so its first result must say so."""
        host = self.host
        before = host.born.get((self.server, self.owner))
        host.born[(self.server, self.owner)] = facts["born"]
        alone = (
            host.kind == "stdio"
            and not host.modern
            and not host.relayed
            and self.session_named is None
            and host.session is None
        )
        if before not in (None, facts["born"]) and alone and RESTARTED not in (result.get("_meta") or {}):
            return "another process than before, and nothing says so: %s after %s" % (facts["born"], before)
        return None


def genuine_prefix(cwd):
    return "d:%s~" % cwd


class Ledger:
    """What was carried out, as the servers wrote it down."""

    def __init__(self, path):
        self.path, self._position, self.counts = path, 0, {}

    def read(self):
        try:
            with open(self.path) as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind("\n") + 1
        self._position += len(data[:whole].encode())
        for line in data[:whole].splitlines():
            label = line.split(" ")[0]
            self.counts[label] = self.counts.get(label, 0) + 1

    def wrong(self, call):
        """What is wrong with how often a settled call was carried out, or None."""
        times = self.counts.get(call.label, 0)
        if call.tool == "ask":
            return None  # asking is no side effect, and a question may be put again
        most = call.copies * (2 if call.tool in REPEATABLE else 1)
        if not call.arrived:
            most = 0
        if times > most:
            return "it was carried out %d times (%s, answers %s)" % (
                times,
                sorted(call.harms),
                json.dumps(call.answers)[:300],
            )
        if not times and any("result" in answer for answer in call.answers):
            return "it has a result and was never carried out"
        return None

    def forget(self, call):
        self.counts.pop(call.label, None)
