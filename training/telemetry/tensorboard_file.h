#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// A number under the name of its chart: {"train/loss", 2.31}.
struct Scalar {
  std::string tag;
  double value = 0;
};

/// Writes an event file that TensorBoard reads, one whole record a step and at once, so that a
/// reader can follow the run. Each run and each resume has a file of its own in the folder.
class TensorBoardFile {
 public:
  /// Begins a file in `folder`, which is made, named after all others there. It tells TensorBoard
  /// to drop what they have from `first_step` on: steps that come again after a resume, or of an
  /// earlier run. FileError names what cannot be made or written.
  TensorBoardFile(const std::string& folder, int64_t first_step);
  ~TensorBoardFile();
  TensorBoardFile(const TensorBoardFile&) = delete;
  TensorBoardFile& operator=(const TensorBoardFile&) = delete;

  /// Writes the numbers of a step; TensorBoard has them as fp32. A run does not end because it
  /// cannot write them: where the disk is full, the rest of the record is taken away again, nothing
  /// further is written, and the one call to which that happens returns what to tell. All others
  /// return "".
  std::string write(int64_t step, const std::vector<Scalar>& scalars);

  const std::string& path() const { return path_; }

 private:
  /// Whether all of `record` is in the file; if not, none of it.
  bool append(const std::string& record);

  std::string path_;
  int file_ = -1;
  int64_t size_ = 0;  ///< bytes of whole records
  bool failed_ = false;
};

}  // namespace lockstep
