#pragma once

// Internal.

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/block_pool.h"

namespace lockstep {

/// The memory of a flat tensor and of views of it, which is there only while it is open.
class LentStorage {
 public:
  /// What happens to views that nobody listed, when it closes.
  enum class OtherViews {
    follow,  ///< they have no memory either, and have it again when it opens
    keep,    ///< they keep theirs; the flat tensor and the listed views get other memory next time
  };

  /// It is open, with the memory that `flat` has. `views` have its storage; while it is closed
  /// their data throw c10::Error with `message`, those of `flat` are null. `pool` outlives the
  /// tensors' use.
  LentStorage(at::Tensor flat, std::vector<at::Tensor> views, const std::string& message,
              std::shared_ptr<BlockPool> pool);

  /// Gives it memory of any content; the listed views have none yet.
  void allocate();
  /// The same, and the listed views have it too, but for those that somebody has made views of
  /// other memory.
  void open();
  /// Frees the memory.
  void close(OtherViews others);
  bool is_open() const { return open_; }
  /// What the data of listed views say from now on, while it is closed.
  void set_message(const std::string& message);

  /// Of the flat tensor, and of views that follow.
  const c10::StorageImpl* storage() const { return storage_.unsafeGetStorageImpl(); }
  /// Of the listed views while it is closed.
  const c10::StorageImpl* closed() const { return closed_.unsafeGetStorageImpl(); }

 private:
  void switch_views(const c10::Storage& from, const c10::Storage& to);
  void release();

  at::Tensor flat_;
  std::vector<at::Tensor> views_;
  std::shared_ptr<BlockPool> pool_;
  c10::Storage storage_, closed_;
  bool open_ = true;
  bool has_memory_ = true;
  bool of_pool_ = false;  ///< whether its memory is
};

}  // namespace lockstep
