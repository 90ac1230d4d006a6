"""Where the packages take the licenses of other libraries from."""

import contextlib
import io
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "packaging"))
import stage  # pylint: disable=wrong-import-position
import wheel  # pylint: disable=wrong-import-position

ALL = stage.COMPILED_IN | wheel.COPIED_IN | wheel.SENTENCEPIECE


class Notices(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        for patch in (mock.patch.object(stage, "DOCUMENTS", self.root / "doc"),
                      mock.patch.object(stage, "LICENSES", self.root / "licenses"),
                      mock.patch.dict(os.environ)):
            patch.start()
            self.addCleanup(patch.stop)
        os.environ.pop("LOCKSTEP_NOTICES", None)

    def write(self, name):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("license")
        return path

    def test_packages_of_debian_and_of_others(self):
        for library, folder in (
                ("CLI11", "doc/libcli11-dev/copyright"), ("CLI11", "licenses/cli11-devel/LICENSE"),
                ("nlohmann-json", "doc/nlohmann-json3-dev/copyright"),
                ("nlohmann-json", "licenses/json-devel/LICENSE.MIT"),
                ("nlohmann-json", "licenses/nlohmann_json-devel/LICENSE.MIT"),
                ("libprotobuf", "doc/libprotobuf32/copyright"),
                ("libprotobuf", "licenses/protobuf/LICENSE"),
                ("libprotobuf", "licenses/libprotobuf28_3_0/LICENSE"),
                ("libutf8proc", "licenses/utf8proc/LICENSE.md"),
                ("libzstd", "licenses/libzstd/LICENSE"),
                ("libsentencepiece", "licenses/sentencepiece-libs/LICENSE")):
            with self.subTest(folder):
                path = self.write(folder)
                self.assertEqual(stage.notice(library, ALL[library]), path)
                path.unlink()

    def test_of_two_licenses_that_of_bsd_and_not_gpl(self):
        self.write("licenses/zstd/COPYING")
        path = self.write("licenses/zstd/LICENSE")
        self.assertEqual(stage.notice("libzstd", ALL["libzstd"]), path)

    def test_what_cannot_be_found_can_be_given(self):
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit) as refused:
            stage.notice("CLI11", ALL["CLI11"])
        self.assertRegex(str(refused.exception),
                         r"found no license of CLI11, .*/doc/libcli11-dev or .*/licenses/cli11\*; "
                         r"copy it to a file 'CLI11' in a folder, and set LOCKSTEP_NOTICES to")
        path = self.write("given/CLI11")
        os.environ["LOCKSTEP_NOTICES"] = str(path.parent)
        self.assertEqual(stage.notice("CLI11", ALL["CLI11"]), path)


if __name__ == "__main__":
    unittest.main()
