"""Long silences: calls of two minutes, and streams on which nothing happens.

Users lose calls to somebody's timer: a proxy's default of 30 or 60 s, a client that
gives up when it reads nothing, a limit on the link that was meant for the greeting.
Here nothing happens for longer than any of these, on every way into mcpx at once.
"""
import asyncio
import json
import socket
import time

from link import connect
from place import expect, wait_until

# Longer than the timers that clients, proxies and SDKs are known to have.
SILENCE_S = 125
# mcpx promises a comment at least this often on a quiet stream; it looks around every few seconds.
COMMENT_S = 15
COMMENT_SLACK_S = 3
# Another call meanwhile, on the same server.
MEANWHILE_EVERY_S = 5
MEANWHILE_LIMIT_S = 1.5
# Of the server that has a limit.
CALL_LIMIT_S = 40

HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "patient", "version": "1"}}


def check_patience(place):
    """Every quiet call is answered, every quiet stream stays alive, and only a configured limit ends anything."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    place.configure(
        {
            "demo": place.demo_server(scope="global"),
            "limited": place.demo_server(scope="global", callTimeout="%ds" % CALL_LIMIT_S),
        },
        **{"http.listen": "127.0.0.1:%d" % port, "http.auth": "none"}
    )
    return asyncio.run(be_patient(place, port)), "%d s of silence" % SILENCE_S


async def be_patient(place, port):
    link = await connect(place, ["demo"])
    await link.initialize()
    limited = await connect(place, ["limited"])
    await limited.initialize()
    wait_until(lambda: can_connect(port), 10, "the door is open")
    found = await asyncio.gather(
        quiet_call(link), talking_call(link), meanwhile(link), limited_call(limited), quiet_post(port),
        quiet_stream(port)
    )
    await link.close()
    await limited.close()
    return [finding for findings in found for finding in findings]


def can_connect(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def sleep_params(text, every=0.0):
    params = {"name": "sleep", "arguments": {"seconds": SILENCE_S, "text": text, "every": every}}
    return dict(params, _meta={"progressToken": text}) if every else params


async def quiet_call(link):
    """Two minutes over stdio without a word."""
    answer = await link.request("tools/call", sleep_params("quiet"), SILENCE_S + 20)
    return [] if "quiet" in json.dumps(answer.get("result")) else ["the quiet call got %s" % answer]


async def talking_call(link):
    """The same with progress, which must come when it is sent and not later."""
    at = []
    link.on_message = lambda message: message.get("method") == "notifications/progress" and at.append(time.monotonic())
    started = time.monotonic()
    answer = await link.request("tools/call", sleep_params("talking", 2), SILENCE_S + 20)
    late = [moment - started - 2 * n for n, moment in enumerate(at, 1)]
    found = [] if "talking" in json.dumps(answer.get("result")) else ["the talking call got %s" % answer]
    if len(at) < SILENCE_S // 2 - 1 or max(late) > 1.5:
        found.append("progress came %d times, at most %.1f s late" % (len(at), max(late, default=0)))
    return found


async def meanwhile(link):
    """Others are not held up."""
    found, end = [], time.monotonic() + SILENCE_S - 10
    while time.monotonic() < end:
        started = time.monotonic()
        await link.request("ping")
        await link.request("tools/call", {"name": "echo", "arguments": {"text": "x"}})
        took = time.monotonic() - started
        if took > MEANWHILE_LIMIT_S:
            found.append("a ping and a short call took %.1f s meanwhile" % took)
        await asyncio.sleep(MEANWHILE_EVERY_S)
    return found


async def limited_call(link):
    """The limit that was configured ends the call, once, and nothing else."""
    started = time.monotonic()
    answer = await link.request("tools/call", sleep_params("limited"), SILENCE_S)
    took = time.monotonic() - started
    after = await link.request("tools/call", {"name": "echo", "arguments": {"text": "after"}})
    found = [] if "callTimeout" in answer.get("error", {}).get("message", "") else ["the limited call got %s" % answer]
    if not CALL_LIMIT_S - 1 < took < CALL_LIMIT_S + 10:
        found.append("a limit of %d s ended a call after %.1f s" % (CALL_LIMIT_S, took))
    return found if "after" in json.dumps(after.get("result")) else found + ["after the limit: %s" % after]


# ---------------------------------------------------------------------------
# Over HTTP
# ---------------------------------------------------------------------------


class Exchange:
    """A request on a connection of its own; every line of the answer with the time it came."""

    async def send(self, port, method, body, **headers):
        data = json.dumps(body).encode() if body is not None else b""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        lines = ["%s /mcp/demo HTTP/1.1" % method, "Host: 127.0.0.1:%d" % port, "Content-Length: %d" % len(data)]
        lines += ["Content-Type: application/json", "Accept: application/json, text/event-stream"]
        lines += ["%s: %s" % (name.replace("_", "-"), value) for name, value in headers.items()]
        self.started = time.monotonic()
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + data)
        return self

    async def lines(self, seconds):
        """Lines until the answer has come, or for so long: (seconds after the request, line)."""
        end = self.started + seconds
        while time.monotonic() < end:
            try:
                line = await asyncio.wait_for(self.reader.readline(), end - time.monotonic())
            except asyncio.TimeoutError:
                return
            if not line:
                return
            yield time.monotonic() - self.started, line.strip()

    def close(self):
        self.writer.close()


async def new_session(port):
    exchange = await Exchange().send(port, "POST", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO})
    headers = {}
    async for _at, line in exchange.lines(10):
        name, colon, value = line.partition(b": ")
        if not line:
            break
        headers[name.lower()] = value.decode()
    exchange.close()
    expect(b"mcp-session-id" in headers, "initialize over HTTP gave no session: %s", headers)
    named = {"Mcp_Session_Id": headers[b"mcp-session-id"], "MCP_Protocol_Version": HELLO["protocolVersion"]}
    done = await Exchange().send(port, "POST", {"jsonrpc": "2.0", "method": "notifications/initialized"}, **named)
    await done.reader.readline()
    done.close()
    return named


async def quiet_post(port):
    """A call of two minutes: its head comes at once, then comments, then the result."""
    session = await new_session(port)
    request = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": sleep_params("posted")}
    exchange = await Exchange().send(port, "POST", request, **session)
    times, result = [0.0], None
    async for at, line in exchange.lines(SILENCE_S + 20):
        times.append(at)
        if b'"id":7' in line.replace(b" ", b""):
            result = line
            break
    exchange.close()
    found = [] if result and b"posted" in result else ["the call over HTTP got no result"]
    return found + gaps("a call over HTTP", times)


async def quiet_stream(port):
    """A session's own stream, on which nothing ever happens."""
    exchange = await Exchange().send(port, "GET", None, **await new_session(port))
    times = [0.0]
    async for at, _line in exchange.lines(SILENCE_S):
        times.append(at)
    exchange.close()
    return gaps("an idle stream", times + [float(SILENCE_S)])


def gaps(what, times):
    """Findings where a reader saw nothing for too long."""
    longest = max(after - before for before, after in zip(times, times[1:]))
    found = ["%s was silent for %.1f s" % (what, longest)] if longest > COMMENT_S + COMMENT_SLACK_S else []
    if times[1] > 1.5:
        found.append("%s sent its first byte after %.1f s" % (what, times[1]))
    return found
