"""mcpx's door for hosts over HTTP, in the place of a check."""
import contextlib
import socket
import subprocess

from check_asking import free_port
from place import expect, wait_until

START_LIMIT_S = 20
END_LIMIT_S = 30


@contextlib.contextmanager
def open_door(place, servers, **settings):
    """Run a daemon with these servers; gives the URL under which they are, to end with a server's name.

    The door has no token: the checks that use it are about what is said there.
    """
    port = free_port()
    place.configure(servers, **dict(settings, **{"http.listen": "127.0.0.1:%d" % port, "http.auth": "none"}))
    with open(place.root / "daemon.log", "ab") as out:
        daemon = subprocess.Popen(
            place.mcpx("daemon"), cwd=str(place.work), env=place.env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        wait_until(lambda: daemon.poll() is not None or is_open(port), START_LIMIT_S, "the door is open")
        expect(daemon.poll() is None, "the daemon ended with %s", daemon.returncode)
        yield "http://127.0.0.1:%d/mcp/" % port
    finally:
        daemon.terminate()
        daemon.wait(END_LIMIT_S)


def is_open(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
