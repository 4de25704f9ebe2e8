#!/usr/bin/env python3
"""What no pool written in Python can go below: relays with mcpx's hops and nothing else.

    host --pipe--> shim --unix socket--> daemon --pipe--> server

    raw  copies bytes and starts a server for each connection
    mux  one server for all: decodes every line, changes its id, encodes it again

usage: bench_floors.py shim SOCKET
       bench_floors.py raw|mux SOCKET COMMAND...
"""
import os
import select
import selectors
import socket
import sys

READ_BYTES = 65536


def write_all(fd, data):
    """Write to a blocking descriptor."""
    while data:
        data = memoryview(data)[os.write(fd, data):]


def relay(path):
    """Be the shim: copy in both directions until one side ends."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    goes_to = {0: link.fileno(), link.fileno(): 1}
    poller = select.poll()
    for fd in goes_to:
        poller.register(fd, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            data = os.read(fd, READ_BYTES)
            if not data:
                return
            write_all(goes_to[fd], data)


def start_server(command):
    """Start the server; returns the descriptors of its stdin and stdout."""
    stdin, to_server = os.pipe()
    from_server, stdout = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, stdout, 1)]
    os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    os.close(stdin)
    os.close(stdout)
    return to_server, from_server


class Daemon:
    """The loop that both daemons have in common: accept, and hand on what is readable."""

    def __init__(self, path):
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(512)
        self.selector.register(self.listener, selectors.EVENT_READ, self.on_connection)

    def watch(self, fd, callback):
        self.selector.register(fd, selectors.EVENT_READ, callback)

    def run(self):
        while True:
            for key, _ in self.selector.select():
                key.data(key.fd)

    def on_connection(self, _fd):
        """Take a host."""
        raise NotImplementedError


class RawDaemon(Daemon):
    """Bytes only, a server for each host."""

    def __init__(self, path, command):
        super().__init__(path)
        self.command = command

    def on_connection(self, _fd):
        fd = self.listener.accept()[0].detach()
        to_server, from_server = start_server(self.command)

        def copy(source, target):
            data = os.read(source, READ_BYTES)
            if data:
                write_all(target, data)
                return
            for end in (fd, from_server):
                self.selector.unregister(end)
            for end in (fd, from_server, to_server):
                os.close(end)

        self.watch(fd, lambda source: copy(source, to_server))
        self.watch(from_server, lambda source: copy(source, fd))


class Lines:
    """Cuts what is read from a descriptor into lines."""

    def __init__(self):
        self.pieces = []

    def read(self, fd):
        """The complete lines of one read; None at the end of the stream."""
        data = os.read(fd, READ_BYTES)
        if not data:
            return None
        self.pieces.append(data)
        if b"\n" not in data:
            return []
        lines = b"".join(self.pieces).split(b"\n")
        self.pieces = [lines.pop()]
        return lines


class MuxDaemon(Daemon):
    """One server for all hosts; `initialize` is answered from the first answer to it."""

    def __init__(self, path, command):
        import json

        super().__init__(path)
        self.decode = json.JSONDecoder().decode
        self.encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
        self.to_server, from_server = start_server(command)
        self.in_flight = {}  # our id -> (descriptor of the host, its id, was it an initialize)
        self.last_id = 0
        self.handshake = None
        self.open = set()
        lines = Lines()
        self.watch(from_server, lambda fd: self.from_server(lines.read(fd)))

    def send(self, fd, message):
        write_all(fd, self.encode(message).encode() + b"\n")

    def on_connection(self, _fd):
        fd = self.listener.accept()[0].detach()
        self.open.add(fd)
        lines = Lines()
        self.watch(fd, lambda fd: self.from_host(fd, lines.read(fd)))

    def from_host(self, fd, lines):
        if lines is None:
            self.selector.unregister(fd)
            self.open.discard(fd)
            os.close(fd)
            return
        for line in lines:
            message = self.decode(line.decode())
            if "id" not in message:
                continue
            is_handshake = message["method"] == "initialize"
            if is_handshake and self.handshake is not None:
                self.send(fd, {"jsonrpc": "2.0", "id": message["id"], "result": self.handshake})
                continue
            self.last_id += 1
            self.in_flight[self.last_id] = fd, message["id"], is_handshake
            message["id"] = self.last_id
            self.send(self.to_server, message)

    def from_server(self, lines):
        if lines is None:
            sys.exit("the server has ended")
        for line in lines:
            message = self.decode(line.decode())
            fd, message["id"], is_handshake = self.in_flight.pop(message["id"])
            if is_handshake:
                self.handshake = message["result"]
            if fd in self.open:
                self.send(fd, message)


def main(role, path, *command):
    if role == "shim":
        relay(path)
    else:
        {"raw": RawDaemon, "mux": MuxDaemon}[role](path, command).run()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (BrokenPipeError, ConnectionError, KeyboardInterrupt):
        pass
    os._exit(0)
