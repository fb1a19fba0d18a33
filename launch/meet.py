"""All machines of a run meet at one port of the first, before torchrun starts. Needs nothing but Python.

    meet.py --hosts node-a,node-b --port 29500 [--seconds 1800]

Prints `host` (this machine has the port) or `guest` and ends with 0 when all are there. torchrun would wait for a missing machine without a word;
here it has a name. Checked on the way: every host's name is known on every machine, the port is free on the first and reached from all others, all
were started with the same hosts. Ends with 1 and one line that says what is wrong, where, and what to do, after --seconds at the latest.
"""

import argparse
import errno
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HELLO, WELCOME, GO, OTHERS = b"videoqat meet ", b"welcome\n", b"go\n", b"other hosts\n"
Address = tuple[socket.AddressFamily, tuple[str, int]]


class Failed(Exception):
    """The machines can't meet. `str(error)` is one line for the user."""


class Meeting:
    """What this machine knows: who is to come, where, until when."""

    def __init__(self, hosts: list[str], port: int, seconds: float) -> None:
        self.hosts, self.port, self.seconds = hosts, port, seconds
        self.me = socket.gethostname()
        self.place = f"{hosts[0]}:{port}"
        self._deadline = time.monotonic() + seconds
        self._said: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds until it is given up."""
        return self._deadline - time.monotonic()

    def say(self, message: str) -> None:
        """One line on standard error; the same one not more often than every 30 seconds."""
        now = time.monotonic()
        if now - self._said.get(message, -60.0) >= 30:
            self._said[message] = now
            print(f"meet on {self.me}: {message}", file=sys.stderr, flush=True)


def resolve(host: str, port: int) -> Address:
    """The first address of `host`; OSError if its name isn't known."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, (str(address[0]), port)


def resolve_all(meeting: Meeting) -> list[Address]:
    """An address for each host. In Kubernetes a name is known only when its pod is placed, so a name that isn't is asked for again."""
    while True:
        addresses, wrong = [], ""
        for host in meeting.hosts:
            try:
                addresses.append(resolve(host, meeting.port))
            except OSError as error:
                wrong = f"the name of host {host!r} is not known on {meeting.me} ({error.strerror or error})"
        if not wrong:
            return addresses
        if meeting.left < 1:
            raise Failed(f"{wrong}; correct --hosts, or the DNS or /etc/hosts of {meeting.me}")
        meeting.say(f"{wrong}; trying again")
        time.sleep(1)


def is_mine(address: Address) -> bool:
    """Whether the address belongs to this machine: only those can be bound to. Names don't tell: aliases, several networks."""
    family, (host, _) = address
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


@contextmanager
def listening(family: socket.AddressFamily, port: int) -> Iterator[socket.socket | None]:
    """A server on `port` of all networks, or None if the port is taken."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the connections of a run that has just ended don't count
        try:
            server.bind(("", port))
            server.listen(1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise Failed(f"port {port} can't be opened on {socket.gethostname()}: {error.strerror}; choose another --port") from error
            yield None
            return
        yield server


def names_missing(meeting: Meeting, addresses: list[Address], came: dict[socket.socket, str]) -> list[str]:
    """Hosts, other than the first, of which nothing was heard, by name and by address."""
    names = {name.split(".")[0] for name in came.values()}
    seen = {guest.getpeername()[0] for guest in came}
    return [
        host
        for host, (_, (address, _)) in zip(meeting.hosts[1:], addresses[1:], strict=True)
        if host.split(".")[0] not in names and address not in seen
    ]


def receive(meeting: Meeting, addresses: list[Address], server: socket.socket) -> None:
    """The host's part: welcomes guests until all are there, then sends them off together."""
    expected, hello = len(meeting.hosts) - 1, HELLO + ",".join(meeting.hosts).encode() + b" "
    came: dict[socket.socket, str] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(came) < expected:
            missing = names_missing(meeting, addresses, came)
            state = f"{len(came) + 1} of {expected + 1} machines are at {meeting.place}" + (f"; not yet: {', '.join(missing)}" if missing else "")
            if meeting.left < 0:
                raise Failed(
                    f"after {meeting.seconds:.0f} s {state}. Was it started there, with the same --hosts and --port? "
                    f"Can it reach port {meeting.port} here (firewall)? Its own log says more"
                )
            meeting.say(state)
            for key, _ in selector.select(timeout=1):
                if key.fileobj is server:
                    guest, _ = server.accept()
                    guest.settimeout(5)
                    selector.register(guest, selectors.EVENT_READ)
                    continue
                guest = key.fileobj  # type: ignore[assignment]
                try:
                    line = guest.recv(65536)
                    if guest not in came and line.startswith(hello):
                        guest.sendall(WELCOME)
                        came[guest] = line[len(hello) :].decode(errors="replace").strip()
                        continue
                    if line.startswith(HELLO):
                        guest.sendall(OTHERS)
                except OSError:
                    pass
                came.pop(guest, None)  # gone, or no guest of ours
                selector.unregister(guest)
                guest.close()
        for guest in came:
            guest.sendall(GO)
        for guest in came:  # the guest closes first, so that this side's port is free at once
            with suppress(OSError):
                guest.recv(1)
            guest.close()


def visit(meeting: Meeting, address: Address) -> str:
    """A guest's part: waits at the host for the others. Returns '' when all were there, else what was wrong."""
    hello = HELLO + ",".join(meeting.hosts).encode() + b" " + meeting.me.encode() + b"\n"
    try:
        with socket.create_connection(address[1], timeout=5) as host:
            host.sendall(hello)
            answer = host.recv(len(WELCOME))
            if answer == OTHERS[: len(WELCOME)]:
                raise Failed(f"{meeting.place} was started with other --hosts than {meeting.me} ({','.join(meeting.hosts)}); give all the same")
            if answer != WELCOME:
                return "something else listens there"
            meeting.say(f"at {meeting.place}, waiting for the others")
            while meeting.left > 0:
                host.settimeout(max(0.1, min(meeting.left, 30)))
                try:
                    return "" if host.recv(len(GO)) == GO else "it closed the connection"
                except TimeoutError:
                    meeting.say(f"at {meeting.place}, waiting for the others")
            return "the others did not come; its log says which"
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def meet(meeting: Meeting) -> str:
    """`host` or `guest`, when all machines are there.

    Raises:
        Failed: they are not, within the time.
    """
    addresses = resolve_all(meeting)
    mine = is_mine(addresses[0])
    while True:
        if mine:
            with listening(addresses[0][0], meeting.port) as server:
                if server is not None:
                    receive(meeting, addresses, server)
                    return "host"
        wrong = visit(meeting, addresses[0])
        if not wrong:
            return "guest"
        if mine:
            problem = f"port {meeting.port} of {meeting.me} is taken ({wrong}); `ss -ltnp` shows by what; end that, or give --port"
        else:
            problem = (
                f"{meeting.me} can't meet the others at {meeting.place} ({wrong}); is the run started there, and is the port open to {meeting.me}?"
            )
        if meeting.left < 0:
            raise Failed(f"after {meeting.seconds:.0f} s: {problem}")
        meeting.say(f"{problem}; trying again")
        time.sleep(0.5)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", required=True, help="all machines, parted by commas; they meet at the first")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=1800)
    arguments = parser.parse_args()
    meeting = Meeting(arguments.hosts.split(","), arguments.port, arguments.seconds)
    try:
        print(meet(meeting))
    except Failed as error:
        print(f"meet on {meeting.me}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
