"""`lockstep configs`, and configurations that are given by name."""

import subprocess
import unittest

from support import BUILD, LOCKSTEP, SOURCE, EndToEnd, clean_environment, run

NAMES = sorted(path.stem for path in (SOURCE / "configs").glob("*.textproto"))


class Configs(EndToEnd):
    def in_folder(self, *arguments):
        return subprocess.run([LOCKSTEP, *map(str, arguments)], capture_output=True,
                              env=clean_environment(), cwd=self.folder, check=False)

    def test_they_are_listed_with_a_line_each(self):
        result = run(LOCKSTEP, "configs")
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.decode().splitlines()
        self.assertEqual([line.split()[0] for line in lines], NAMES)
        self.assertIn("tiny", NAMES)
        for line in lines:
            self.assertLessEqual(len(line), 100)
            self.assertRegex(line, r"^\S+ +[A-Z].*[^.]$")
        self.assertIn("The model that `make train` trains: English text as bytes, on two "
                      "data-parallel ranks", lines[NAMES.index("tiny")])
        self.assertTrue(lines[NAMES.index("moe_tiny")].endswith(
            "A mixture of twelve experts, split over two ranks"))

    def test_path_and_show(self):
        for name in NAMES:
            path = self.in_folder("configs", "--path", name).stdout.decode().rstrip("\n")
            self.assertTrue(path.startswith(str(BUILD.resolve())), path)
            source = (SOURCE / f"configs/{name}.textproto").read_bytes()
            with open(path, "rb") as file:
                self.assertEqual(file.read(), source)
            self.assertEqual(self.in_folder("configs", "--show", name).stdout, source)

    def test_a_name_stands_for_the_file(self):
        file = SOURCE / "configs/tiny.textproto"
        for command in (("train", "{}", "--print-config"), ("plan", "memory", "{}")):
            by_name = self.in_folder(*(word.replace("{}", "tiny") for word in command))
            by_path = self.in_folder(*(word.replace("{}", str(file)) for word in command))
            self.assertEqual(by_name.returncode, 0, by_name.stderr)
            self.assertEqual(by_name.stdout, by_path.stdout)

    def test_a_file_of_that_name_comes_first_and_a_folder_does_not(self):
        (self.folder / "tiny").write_text("model { num_layers: 7 }")
        printed = self.in_folder("train", "tiny", "--print-config").stdout.decode()
        self.assertIn("num_layers: 7", printed)
        (self.folder / "tiny").unlink()
        (self.folder / "tiny").mkdir()
        printed = self.in_folder("train", "tiny", "--print-config").stdout.decode()
        self.assertIn("num_layers: 4", printed)

    def test_what_is_neither_a_file_nor_a_name(self):
        names = ", ".join(NAMES)
        for command in (("train",), ("plan", "memory")):
            for given in ("tinny", "configs/tiny.textproto", "two words"):
                self.assert_failed(
                    self.in_folder(*command, given), 2,
                    f"CONFIG: '{given}' cannot be read as a configuration: No such file or "
                    f"directory; configurations that come with lockstep: {names}")
        for option in ("--path", "--show"):
            for given in ("tinny", "", "../configs/tiny"):
                self.assert_failed(self.in_folder("configs", option, given), 2,
                                   f"{option}: found '{given}', allowed: {names}")
        self.assert_failed(self.in_folder("configs", "--path", "tiny", "--show", "tiny"), 2,
                           "excludes --")

    def test_the_text_that_a_configuration_names_is_not_there(self):
        result = self.in_folder("train", "tiny", "--set", "train.train_iters=1")
        self.assert_failed(
            result, 1, "data.path: 'data/alice29.txt' cannot be read: No such file or directory "
            f"(in the working folder {self.folder.resolve()}); allowed: plain text files",
            "as in --set data.path=FILE")
        whole = self.folder / "none"
        result = self.in_folder("train", self.config, "--set", f"data.path={whole}")
        self.assert_failed(result, 1, f"data.path: '{whole}' cannot be read: No such file or "
                           "directory; allowed: plain text files")

    def test_a_program_that_was_copied_without_them(self):
        for part in ("lockstep", "libexec/lockstep"):
            copy = self.folder / "copy" / part
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes((BUILD / part).read_bytes())
            copy.chmod(0o755)
        program = self.folder / "copy/lockstep"
        listed = run(program, "configs")
        self.assertEqual((listed.returncode, listed.stdout), (0, b""))
        self.assertEqual(run(program, "plan", "memory", self.config).returncode, 0)
        self.assert_failed(run(program, "plan", "memory", "tiny"), 2, "come with lockstep: none")


if __name__ == "__main__":
    unittest.main()
