"""Strangers at the ports of a run: clients that send garbage or nothing, and floods of them, at the
port where the ranks meet and at those of their connections."""

import errno
import pathlib
import socket
import threading
import time

from case import SILENT, Cell, shorten
from process_cells import MOMENTS, choose_layout
from training import SEVERAL, TOTAL, Training

GREETINGS = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
             b"SSH-2.0-OpenSSH_9.6\r\n", b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x00" * 64)


def listening_ports(pids):
    """Returns the loopback ports at which processes listen."""
    ports = set()
    for pid in pids:
        folder = pathlib.Path(f"/proc/{pid}")
        try:
            own = {str(entry.readlink()) for entry in (folder / "fd").iterdir()}
            lines = [line for table in ("tcp", "tcp6")
                     for line in (folder / "net" / table).read_text().splitlines()]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


class Strangers(threading.Thread):
    """Connects to the ports of a life again and again, until end() is called."""

    def __init__(self, case, life, number, behave):
        super().__init__(daemon=True)
        self.life, self.number, self.behave = life, number, behave
        self.random = case.random
        self.connections, self.count, self.stopped = [], 0, False
        self.missed = 0  # looks at ports without any connection, of a run that still trained then

    def run(self):
        while not self.stopped:
            ports = listening_ports(self.life.pids().values())
            for port in 10 * ports:
                self.visit(port)
            self.missed += not self.count and self.life.last_iteration() < TOTAL
            time.sleep(0.05)

    def visit(self, port):
        if len(self.connections) >= self.number:
            self.connections.pop(self.random.randrange(len(self.connections))).close()
        try:
            client = socket.create_connection(("127.0.0.1", port), timeout=1)
            self.connections.append(client)
            self.count += 1
            client.setblocking(False)
            self.behave(self.random, client)
        except OSError as error:
            if error.errno == errno.EMFILE:
                self.number = len(self.connections) - 1

    def end(self):
        self.stopped = True
        self.join()
        for connection in self.connections:
            connection.close()


def send_garbage(random, client):
    client.send(random.choice((*GREETINGS, random.randbytes(random.randint(1, 4096)))))
    if random.random() < 0.5:
        client.close()


def send_nothing(random, client):
    """Keeps the connection open."""


def send_slowly(random, client):
    client.send(random.randbytes(1))


def visited(phase, number, behave):
    def body(case):
        training = Training(case, choose_layout(case, SEVERAL), case.choose((True, False)))
        life = training.start()
        if phase == "step":
            MOMENTS["step"](training, life)
        strangers = Strangers(case, life, number, behave)
        strangers.start()
        statuses = life.wait(300)
        strangers.end()
        case.faults += strangers.count
        case.draw(f"{strangers.count} connections")
        case.require(SILENT, statuses == [0] * len(statuses),
                     lambda: f"status {statuses}: {shorten(life.text())}")
        # A run that trains already may be done before the first look.
        if not strangers.count and (phase == "start" or strangers.missed):
            raise RuntimeError(f"no stranger reached a port of {training.layout}")
        training.judge(life)
        training.check_end()
    return body


CELLS = [
    Cell("garbage at the ports", "start", visited("start", 8, send_garbage), 4, 1),
    Cell("garbage at the ports", "step", visited("step", 8, send_garbage), 4),
    Cell("connections without a word", "start", visited("start", 300, send_nothing), 4),
    Cell("a flood of 400 connections, a byte each", "start", visited("start", 400, send_slowly), 4),
]
