"""External projects, built out of the tree with the installed package."""

import re

from support import BUILD, EndToEnd, launch, run


def losses_of(output):
    return [float(number) for number in re.findall(r"loss (\S+)", output)]


class InstalledProjects(EndToEnd):
    def assert_same(self, losses, expected):
        self.assertEqual(len(losses), len(expected))
        for one, other in zip(losses, expected):
            self.assertAlmostEqual(one, other, delta=1e-12 * max(1, abs(other)))

    def command(self, *arguments):
        result = run(*arguments, timeout=900)
        output = result.stdout.decode() + result.stderr.decode()
        self.assertEqual(result.returncode, 0, output)
        return output

    def on_ranks(self, ranks, *command):
        """Returns what all ranks print on standard output."""
        result = launch(ranks, *command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout.decode()

    def install(self):
        prefix = self.folder / "prefix"
        self.command("cmake", "--install", BUILD, "--prefix", prefix)
        return prefix

    def build(self, source, prefix, *targets):
        build = self.folder / ("build_" + source.name)
        cache = (BUILD / "CMakeCache.txt").read_text()
        sanitize = re.search(r"LOCKSTEP_SANITIZE:STRING=(.*)", cache).group(1)
        flags = f"-fsanitize={sanitize}" if sanitize else ""
        self.command("cmake", "-S", source, "-B", build, "-G", "Ninja",
                     f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_CXX_FLAGS={flags}")
        self.command("cmake", "--build", build, *targets)
        return build
