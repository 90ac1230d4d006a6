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

/// Writes an event file that TensorBoard reads, one whole record per step, immediately, so that a
/// reader can follow the run. Each run and each resume has its own file in the folder.
class TensorBoardFile {
 public:
  /// Begins a file in `folder`, which is created; its name sorts after all others there. It tells
  /// TensorBoard to drop what they have from `first_step` on: steps that are repeated after a
  /// resume, or steps of an earlier run. FileError names what cannot be created or written.
  TensorBoardFile(const std::string& folder, int64_t first_step);
  ~TensorBoardFile();
  TensorBoardFile(const TensorBoardFile&) = delete;
  TensorBoardFile& operator=(const TensorBoardFile&) = delete;

  /// Writes the numbers of a step; TensorBoard stores them as fp32. A run does not end because it
  /// cannot write them: if the disk is full, the partial record is removed, nothing further is
  /// written, and the one call that hits this returns what to tell the user. All others return "".
  std::string write(int64_t step, const std::vector<Scalar>& scalars);

  /// The run repeats the steps from `first_step` on: they go to a new file, begun as by the
  /// constructor. If that is impossible, nothing further is written, as when write() fails, and
  /// this call returns what to tell the user. All others return "".
  std::string go_back(int64_t first_step);

  const std::string& path() const { return path_; }

 private:
  /// Whether all of `record` is in the file; if not, none of it.
  bool append(const std::string& record);

  /// Closes the file, if one is open, and begins the next one.
  void begin(int64_t first_step);
  void close();

  std::string folder_, path_;
  int file_ = -1;
  int64_t size_ = 0;  ///< bytes of whole records
  bool failed_ = false;
};

}  // namespace lockstep
