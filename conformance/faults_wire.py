"""The wire between the daemon and a server, as a program: relays both ways and does damage when it is told to.

usage: faults_wire.py COMMAND [ARGUMENT ...]

Connects to the socket named by FAULTS_CONTROL and says who it is; each line that comes back is an order for the
next line on one side, {"side": "in" | "out", "fault": ..., "until": wall time, ...}. It answers with the beginning
of the line that was hit. Without anybody to order it, it only relays.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time

# How much of a damaged line is reported: enough for its id and label.
REPORT_BYTES = 600


class Side:
    """One direction, in a thread of its own: lines are taken from one descriptor and written to another.

    Two directions in one thread would lock up where server and daemon both write more than a pipe holds.
    """

    def __init__(self, source, target, report):
        self.source, self.target, self.report = source, target, report
        self.orders = []
        self.buffer = b""  # what has come of a line that is not complete
        self.relayed = False  # that beginning was passed on already
        self.glue = b""  # a line whose end was lost: it runs into the next one

    def run(self, on_end):
        try:
            while True:
                data = os.read(self.source, 1 << 16)
                if not data:
                    break
                self.take(data)
            if not self.relayed:
                self.write(self.glue + self.buffer)
        except OSError:
            pass  # whoever reads there has gone, which ends this direction
        on_end()

    def write(self, data, step=1 << 16, pause=0.0):
        while data:
            data = data[os.write(self.target, data[:step]) :]
            if pause and data:
                time.sleep(pause)

    def take(self, data):
        if self.relayed:
            # The rest of a line whose beginning was passed on: no fault hits half a line.
            end = data.find(b"\n") + 1
            self.write(data[:end] if end else data)
            if not end:
                return
            self.relayed, data = False, data[end:]
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            line, self.glue = self.glue + line, b""
            if self.orders and line.strip():
                self.damage(self.orders.pop(0), line)
            else:
                self.write(line + b"\n")
        if self.buffer and not self.orders and not self.glue:
            self.write(self.buffer)
            self.buffer, self.relayed = b"", True

    def damage(self, order, line):
        if time.time() > order["until"]:
            self.write(line + b"\n")
            return
        fault, at = order["fault"], int(order["at"] * len(line))
        self.report(dict(order, wire=os.getpid(), line=line[:REPORT_BYTES].decode("latin-1"),
                         tail=line[-200:].decode("latin-1")))
        if fault == "split":
            self.write(line + b"\n", max(1, len(line) // order["pieces"]), 0.003)
        elif fault == "delay":
            time.sleep(order["seconds"])
            self.write(line + b"\n")
        elif fault == "twice":
            self.write((line + b"\n") * 2)
        elif fault == "drop":
            return
        elif fault == "glue":
            self.glue = line[:at]
        elif fault == "cut":
            self.write(line[:at])
            os._exit(9)
        else:
            byte = {"ff": b"\xff", "nul": b"\0", "newline": b"\n"}[fault]
            self.write(line[:at] + byte + line[at + 1 :] + b"\n")


def main(command):
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    link = socket.socket(socket.AF_UNIX)
    facts = {
        "wire": os.getpid(),
        "child": child.pid,
        "server": os.environ.get("FAULTS_NAME"),
        "instance": os.environ.get("MCPX_INSTANCE"),
    }

    def report(message):
        try:
            link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # there is no driver (any more)

    sides = {"in": Side(0, child.stdin.fileno(), report), "out": Side(child.stdout.fileno(), 1, report)}
    threading.Thread(target=sides["in"].run, args=(child.stdin.close,), daemon=True).start()
    out = threading.Thread(target=sides["out"].run, args=(lambda: os._exit(child.wait() & 0x7F),))
    out.start()
    try:
        link.connect(os.environ["FAULTS_CONTROL"])
        report(facts)
        for line in link.makefile("rb"):
            order = json.loads(line)
            sides[order["side"]].orders.append(order)
    except OSError:
        out.join()


if __name__ == "__main__":
    main(sys.argv[1:])
