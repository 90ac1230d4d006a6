"""Saves whose system calls fail, or during which the process is killed, call by call: there is a
complete checkpoint at any moment, and the next save removes what the interrupted one left.

tests/support/fault_injection.cpp injects the faults. Kills come after each call that changes
something, because the state before a call is that after the last one. Errors come at every call.
LOCKSTEP_ALL_FAULTS=1 kills before and after every call."""

import collections
import json
import os
import shutil
import signal
import unittest

from faults import calls, faults
from support import BUILD, LOCKSTEP, EndToEnd, run

WRITER = BUILD / "tests" / "write_checkpoints"
CHANGES = ("open", "write", "rename", "unlink", "mkdir")
CALLS = (*CHANGES, "close", "fsync", "stat", "list")
ALL = os.environ.get("LOCKSTEP_ALL_FAULTS") == "1"


def faults_of_each_call(*errors):
    """(operation, action)"""
    kills = [(operation, action) for action in ("kill", "kill-after") for operation in CALLS
             if ALL or (operation in CHANGES and action == "kill-after")]
    return kills + [(operation, error) for error in errors for operation in CALLS]


# As on NFS: a rename that should exchange two folders fails. It is the first one that puts a
# partial folder in the place of this step.
NO_EXCHANGE = "rename:EINVAL:1:step_5.partial -> "


class SaveFaults(EndToEnd):
    def setUp(self):
        super().setUp()
        self.number = 0
        self.counts = collections.Counter()

    def tearDown(self):
        if self.counts:
            print(f"{self.id()}: {dict(self.counts)}")

    def new_folder(self, *saves, keep=0):
        self.number += 1
        folder = self.folder / f"steps{self.number}"
        self.save(folder, *saves, keep=keep)
        return folder

    def save(self, folder, *saves, keep=0, expect=0, **environment):
        result = run(WRITER, folder, keep, *saves, **environment)
        if expect is not None:
            self.assertEqual(result.returncode, expect, result.stderr)
        return result

    def newest(self, folder):
        """Verifies the newest checkpoint; returns its (iteration, samples)."""
        verified = run(LOCKSTEP, "checkpoint", "verify", folder, "--json")
        self.assertEqual(verified.returncode, 0, verified.stderr)
        found = json.loads(run(LOCKSTEP, "checkpoint", "inspect", folder, "--json").stdout)
        return found["iteration"], found["consumed_samples"]

    def calls_beside(self, rules, count, folder):
        """Returns how many calls of each operation remain for a further rule."""
        numbers = calls(count, str(folder))
        for rule in rules:
            numbers[rule.split(":")[0]] -= 1
        return numbers

    def each_fault(self, check, errors, before, saves, keep, *rules):
        """For each call that `saves` make in a folder with the checkpoints `before`, and for each
        fault: passes the folder after the fault and the program's result to `check`."""
        count = self.folder / "count"
        folder = self.new_folder(*before, keep=keep)
        self.save(folder, *saves, keep=keep, **faults(*rules, count=count))
        numbers = self.calls_beside(rules, count, folder)
        self.assertGreater(sum(numbers[operation] for operation in CHANGES), 20)
        count.unlink()
        for operation, action in faults_of_each_call(*errors):
            for nth in range(1, numbers[operation] + 1):
                folder = self.new_folder(*before, keep=keep)
                rule = f"{operation}:{action}:{nth}:{folder}"
                with self.subTest(rule=rule):
                    result = self.save(folder, *saves, keep=keep, expect=None,
                                       **faults(*rules, rule))
                    if action.startswith("kill"):
                        self.assertEqual(result.returncode, -signal.SIGKILL, rule)
                    self.counts[action] += 1
                    check(folder, result)

    def check_clean(self, folder, *steps):
        self.assertEqual(sorted(os.listdir(folder)), sorted(["latest", *steps]))
        for step in steps:
            self.assertEqual(len(os.listdir(folder / step)), 3)

    def check_saving_again(self, rules):
        """Saves step 5 again, over an earlier checkpoint of that step."""
        def check(folder, result):
            found = self.newest(folder)
            self.assertIn(found, ((5, 1), (5, 2)))
            if result.returncode == 0:
                self.assertEqual(found, (5, 2))
            elif result.returncode > 0:
                self.assertIn(b"Input/output error", result.stderr)
            self.save(folder, "6:1")
            self.check_clean(folder, "step_4", "step_5", "step_6")
            self.assertEqual(self.newest(folder), (6, 1))
            self.assertEqual(self.newest(folder / "step_5"), found)
        self.each_fault(check, ("EIO",), ("4:1", "5:1"), ("5:2",), 0, *rules)

    def test_a_step_that_is_saved_again(self):
        self.check_saving_again(())

    def test_a_step_that_is_saved_again_where_folders_cannot_be_exchanged(self):
        self.check_saving_again((NO_EXCHANGE,))

    def test_what_is_aside_is_found_under_its_name_by_the_next_save_of_that_step(self):
        folder = self.new_folder("4:1", "5:1")
        # After the first rename: the earlier step is aside, the new one not yet in its place.
        self.save(folder, "5:2", expect=-signal.SIGKILL,
                  **faults(NO_EXCHANGE, "rename:kill-after:1:step_5"))
        self.assertEqual(sorted(os.listdir(folder)),
                         ["latest", "latest.partial", "lock", "step_4", "step_5.old.partial",
                          "step_5.partial"])
        self.assertEqual(self.newest(folder), (5, 1))
        self.save(folder, "5:3", expect=1, **faults("write:ENOSPC:1:step_5"))
        self.assertEqual(self.newest(folder), (5, 1))
        self.assertTrue((folder / "step_5").is_dir())
        self.assertFalse((folder / "step_5.old.partial").exists())
        self.save(folder, "5:4")
        self.assertEqual(self.newest(folder), (5, 4))
        self.check_clean(folder, "step_4", "step_5")

    def test_nothing_of_a_removed_checkpoint_stays(self):
        def check(folder, result):
            iteration, samples = self.newest(folder)
            self.assertIn(iteration, (2, 3))
            self.assertEqual(samples, 1)
            if result.returncode == 0:
                self.assertEqual(iteration, 3)
            self.save(folder, "5:1", "6:1", keep=1)
            self.check_clean(folder, "step_6")
        self.each_fault(check, ("EIO",), ("1:1", "2:1"), ("3:1",), 1)

    def test_a_removal_that_fails_is_told_and_the_save_is_good(self):
        for rule in ("unlink:EIO:1:step_1", "rename:EIO:1:step_1 ", "list:EIO:1:step_1.removed"):
            folder = self.new_folder("1:1", "2:1")
            result = self.save(folder, "3:1", keep=2, **faults(rule.replace("step_1 ", "step_1 -")))
            self.assertIn(b"step_1", result.stderr)
            self.assertIn(b"cannot be removed: Input/output error", result.stderr)
            self.assertEqual(self.newest(folder), (3, 1))
            self.save(folder, "4:1", keep=2)
            self.check_clean(folder, "step_3", "step_4")

    def test_what_cannot_be_removed_is_named_as_what_it_is(self):
        again = self.new_folder("4:1", "5:1")
        # The old step 5, which the new one has replaced.
        result = self.save(again, "5:2", **faults("unlink:EACCES:1+:step_5.partial"))
        self.assertEqual(result.stderr.decode(),
                         f"'{again}/step_5.partial' cannot be removed: Permission denied\n")
        self.assertEqual(self.newest(again), (5, 2))
        folder = self.new_folder()
        for rule, told in (
                ("unlink:EIO:1+:removed.partial",
                 f"'{folder}/step_3.removed.partial' cannot be removed: Input/output error"),
                ("rename:EIO:1:removed.partial",
                 f"'{folder}/step_3' cannot be removed: Input/output error")):
            shutil.rmtree(folder, ignore_errors=True)  # an empty one is not kept
            self.save(folder, "3:1")
            result = self.save(folder, "4:1", keep=1, **faults(rule))
            self.assertEqual(result.stderr.decode(), told + "\n")

    def test_older_checkpoints_that_cannot_be_listed_stay_and_it_is_told(self):
        log = self.folder / "calls"
        self.save(self.new_folder("1:1", "2:1"), "3:1", keep=1, **faults(count=log))
        folder = self.new_folder("1:1", "2:1")
        opened = [line for line in log.read_text().splitlines() if line.startswith("open ")
                  and "/latest" in line]
        last = max(i for i, line in enumerate(opened, 1) if line.endswith("/latest"))
        result = self.save(folder, "3:1", keep=1, **faults(f"open:EIO:{last}:{folder}/latest"))
        self.assertEqual(result.stderr.decode(), f"older checkpoints in '{folder}' are kept: "
                         f"'{folder}/latest' cannot be read: Input/output error\n")
        self.assertEqual(self.newest(folder), (3, 1))

    def test_leftovers_that_cannot_be_removed_are_in_nobodys_way(self):
        folder = self.new_folder("1:1", "2:1")
        stuck = folder / "step_1.partial"
        stuck.mkdir()
        (stuck / "file").touch()
        result = self.save(folder, "3:1", **faults("unlink:EACCES:1+:step_1.partial"))
        self.assertEqual(result.stderr.decode(),
                         f"'{stuck}' cannot be removed: Permission denied\n")
        self.assertEqual(self.newest(folder), (3, 1))
        self.save(folder, "4:1")
        self.check_clean(folder, "step_1", "step_2", "step_3", "step_4")

    def test_the_checkpoint_from_before_skipped_steps_stays(self):
        folder = self.new_folder("1:1", "2:1", "3:1", keep=1)
        self.save(folder, "4:1:1", "5:1:2", "6:1:3", keep=1)
        self.check_clean(folder, "step_3", "step_6")
        self.save(folder, "7:1", keep=1)
        self.check_clean(folder, "step_7")

    def train(self, output, **environment):
        result = run(LOCKSTEP, "train", self.config, "--output", output, "--set",
                     "train.train_iters=2", "--set", "checkpoint.save_interval=1", **environment)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(self.newest(output / "checkpoint")[0], 2)
        return result.stderr.decode()

    def test_metrics_are_on_disk_before_their_checkpoint(self):
        log, output = self.folder / "calls", self.folder / "run"
        self.train(output, **faults(count=log))
        last, saved = "", 0
        for line in log.read_text().splitlines():
            operation, _, path = line.partition(" ")
            if path == f"{output}/metrics.jsonl" and operation in ("write", "fsync"):
                last = operation
            elif operation == "rename" and ".partial -> " in path and "/step_" in path:
                self.assertEqual(last, "fsync", line)
                saved += 1
        self.assertGreaterEqual(saved, 2)

    def test_metrics_that_cannot_be_synchronized_keep_no_checkpoint_back(self):
        output = self.folder / "run"
        told = self.train(output, **faults("fsync:EIO:1+:metrics.jsonl"))
        self.assertIn(f"'{output}/metrics.jsonl' cannot be written: Input/output error\n", told)

    def test_a_file_system_without_locks_is_told(self):
        output = self.folder / "run"
        note = (f"the file system of '{output}/checkpoint' has no locks: another run that saves "
                "there would not be noticed\n")
        for error in ("ENOSYS", "ENOLCK", "EOPNOTSUPP"):
            self.assertIn(note, self.train(output, **faults(f"lock:{error}:1+:checkpoint/lock")))
        self.assertNotIn("has no locks", self.train(output))

    def export(self, folder, weights, config, expect=0, **environment):
        result = run(WRITER, "export", folder, weights, config, **environment)
        if expect is not None:
            self.assertEqual(result.returncode, expect, result.stderr)
        return result

    def content(self, folder):
        return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} \
            if folder.exists() else {}

    def check_export(self, allowed, prepare, config, *rules):
        """Tries every fault of an export of "new" weights; `allowed` lists the possible results."""
        new = {"model.safetensors": "new", "config.json": config}
        count = self.folder / "count"
        prepare(folder := self.folder / "counted" / "hf")
        self.export(folder, "new", config, **faults(*rules, count=count))
        numbers = self.calls_beside(rules, count, folder.parent)
        self.assertGreater(sum(numbers[operation] for operation in CHANGES), 6)
        count.unlink()
        shutil.rmtree(folder.parent)
        for operation, action in faults_of_each_call("EIO"):
            for nth in range(1, numbers[operation] + 1):
                self.number += 1
                around = self.folder / f"export{self.number}"
                folder = around / "hf"
                prepare(folder)
                others = {path.name: path.read_text() for path in folder.glob("notes")}
                rule = f"{operation}:{action}:{nth}:{around}"
                with self.subTest(rule=rule):
                    result = self.export(folder, "new", config, expect=None,
                                         **faults(*rules, rule))
                    found = self.content(folder)
                    self.assertEqual({name: found.pop(name) for name in others}, others)
                    self.assertIn(found, allowed)
                    if result.returncode == 0:
                        self.assertEqual(found, new)
                    elif action.startswith("kill"):
                        self.assertEqual(result.returncode, -signal.SIGKILL)
                    else:
                        self.assertIn(b"Input/output error", result.stderr)
                    self.counts[action] += 1
                    self.export(folder, "new", config)
                    self.assertEqual(self.content(folder), new | others)
                    self.assertEqual(os.listdir(around), ["hf"])
                    self.assertEqual(len(os.listdir(folder)), len(new | others))

    def test_an_export_appears_whole_or_not_at_all(self):
        new = {"model.safetensors": "new", "config.json": "newer"}
        self.check_export(({}, new), lambda folder: folder.parent.mkdir(), "newer")

    def test_an_export_over_another_is_one_of_the_two(self):
        old = {"model.safetensors": "old", "config.json": "older"}
        new = {"model.safetensors": "new", "config.json": "newer"}
        self.check_export((old, new), lambda folder: self.export(folder, "old", "older"), "newer")

    def test_an_export_into_a_folder_with_other_files_is_never_a_mixture(self):
        def prepare(folder):
            self.export(folder, "old", "same")
            (folder / "notes").write_text("mine")
        same = {"config.json": "same"}
        old, new = {"model.safetensors": "old"}, {"model.safetensors": "new"}
        self.check_export((old | same, new | same), prepare, "same")
        other = {"config.json": "other"}
        self.check_export((old | same, old, new, new | other), prepare, "other")

    def test_an_export_over_another_where_folders_cannot_be_exchanged(self):
        old, new = {"model.safetensors": "old"}, {"model.safetensors": "new"}
        older, newer = {"config.json": "older"}, {"config.json": "newer"}
        self.check_export((old | older, old, new, new | newer),
                          lambda folder: self.export(folder, "old", "older"), "newer",
                          "rename:EINVAL:1:hf.unfinished")

    def test_what_an_export_cannot_remove_is_told(self):
        folder = self.folder / "around" / "hf"
        new = {"model.safetensors": "new", "config.json": "newer"}

        def check(rule):
            result = self.export(folder, "new", "newer", **faults(rule))
            self.assertEqual(self.content(folder), new)
            left, = folder.parent.glob("hf.unfinished.*")
            self.assertEqual(result.stderr.decode(),
                             f"'{left}' cannot be removed: Input/output error\n")
            return left
        self.export(folder, "old", "older")
        left = check("unlink:EIO:1+:hf.unfinished")
        self.assertEqual(self.content(left), {"model.safetensors": "old", "config.json": "older"})
        # The next export cannot remove what the first one left either.
        self.assertEqual(check("unlink:EIO:1:hf.unfinished"), left)
        self.assertEqual(self.export(folder, "new", "newer").stderr, b"")
        self.assertEqual(os.listdir(folder.parent), ["hf"])

    def test_an_export_in_the_place_of_a_file_or_over_a_link(self):
        target = self.folder / "target"
        target.mkdir()
        (self.folder / "link").symlink_to(target)
        self.export(self.folder / "link", "new", "newer")
        self.assertEqual(self.content(target), {"model.safetensors": "new", "config.json": "newer"})
        self.assertIn(b"cannot be created: found no folder",
                      self.export(self.folder / "text", "new", "newer", expect=1).stderr)

    def test_no_link_is_followed(self):
        treasure = self.folder / "treasure"
        for name in ("latest.partial", "lock"):
            treasure.write_text("of another user")
            folder = self.new_folder("1:1")
            (folder / name).symlink_to(treasure)
            result = self.save(folder, "2:1", expect=None)
            self.assertEqual(treasure.read_text(), "of another user")
            if name == "lock":
                self.assertEqual(result.returncode, 1)
                self.assertIn(f"'{folder / name}' cannot be written: Too many levels",
                              result.stderr.decode())
            else:
                self.assertEqual(result.returncode, 0, result.stderr)
                self.check_clean(folder, "step_1", "step_2")
        os.link(treasure, (folder := self.new_folder("1:1")) / "lock")
        self.assertIn(b"found no regular file with one name",
                      self.save(folder, "2:1", expect=1).stderr)
        self.assertEqual(treasure.read_text(), "of another user")

    def test_a_folder_without_a_manifest_is_left_alone(self):
        folder = self.new_folder("1:1", "2:1")
        (folder / "step_1" / "manifest.textproto").unlink()
        self.save(folder, "3:1", "4:1", keep=1)
        self.assertEqual(sorted(os.listdir(folder)), ["latest", "step_1", "step_4"])
        self.assertEqual(len(os.listdir(folder / "step_1")), 2)


if __name__ == "__main__":
    unittest.main()
