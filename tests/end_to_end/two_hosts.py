"""Two network namespaces that stand for two hosts, and the link between them. Needs root."""

import subprocess
import uuid

ADDRESSES = ("192.0.2.1", "192.0.2.2")


class Unavailable(Exception):
    """This machine has no network namespaces, or no queue that slows a link down."""


def command(*words):
    try:
        return subprocess.run([str(word) for word in words], capture_output=True, check=False)
    except FileNotFoundError:
        raise Unavailable(f"no program `{words[0]}`") from None


class TwoHosts:
    """Two hosts and their link, as a context manager that removes them."""

    def __init__(self):
        tag = uuid.uuid4().hex[:6]
        self.spaces = [f"lockstep-{tag}-{i}" for i in range(2)]
        self.links = [f"ls{tag}{i}" for i in range(2)]

    def __enter__(self):
        made = [command("ip", "netns", "add", space) for space in self.spaces]
        made.append(command("ip", "link", "add", self.links[0], "netns", self.spaces[0], "type",
                            "veth", "peer", "name", self.links[1], "netns", self.spaces[1]))
        for space, link, address in zip(self.spaces, self.links, ADDRESSES):
            made += [command("ip", "-n", space, "addr", "add", f"{address}/24", "dev", link),
                     command("ip", "-n", space, "link", "set", link, "mtu", "9000", "up"),
                     command("ip", "-n", space, "link", "set", "lo", "up")]
        failed = [each.stderr.decode().strip() for each in made if each.returncode != 0]
        if failed:
            self.__exit__()
            raise Unavailable(f"no network namespaces: {failed[0]}")
        return self

    def __exit__(self, *_):
        for space in self.spaces:
            command("ip", "netns", "delete", space)

    def set_link(self, state):
        command("ip", "-n", self.spaces[1], "link", "set", self.links[1], state)

    def slow(self, rate):
        """Slows down each direction to a rate such as 1gbit."""
        for space, link in zip(self.spaces, self.links):
            made = command("tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", "rate",
                           rate, "burst", "16kb", "latency", "400ms")
            if made.returncode != 0:
                raise Unavailable(f"no slow link: {made.stderr.decode().strip()}")

    def words(self, host, *words):
        """Returns the command that runs `words` on a host."""
        return ["ip", "netns", "exec", self.spaces[host], *(str(word) for word in words)]

    def environment(self, host, port):
        """Returns the variables of the rank of a host, of which there is one on each."""
        return {"RANK": host, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port,
                # The namespaces share their memory, which hosts do not.
                "LOCKSTEP_DIRECT_MEMORY": 0, "GLOO_SOCKET_IFNAME": self.links[host]}
