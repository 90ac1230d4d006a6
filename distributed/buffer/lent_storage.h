#pragma once

// Internal.

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/block_pool.h"

namespace lockstep {

/// The memory of a flat tensor and of views of it. The memory exists only while this object is
/// open.
class LentStorage {
 public:
  /// What happens to unlisted views when it closes.
  enum class OtherViews {
    follow,  ///< they lose their memory too, and get it back when it opens
    keep,    ///< they keep theirs; the flat tensor and the listed views get other memory next time
  };

  /// Starts open, with the memory of `flat`. `views` have its storage. While this object is closed,
  /// access to their data throws c10::Error with `message`, and the data of `flat` is null. `pool`
  /// outlives the use of the tensors.
  LentStorage(at::Tensor flat, std::vector<at::Tensor> views, const std::string& message,
              std::shared_ptr<BlockPool> pool);

  /// Gives it memory with undefined contents; the listed views have none yet.
  void allocate();
  /// The same, and the listed views get the memory too, except those that somebody has made views
  /// of other memory.
  void open();
  /// Frees the memory.
  void close(OtherViews others);
  bool is_open() const { return open_; }
  /// Sets the message with which access to the listed views throws from now on, while this is
  /// closed.
  void set_message(const std::string& message);

  /// The storage of the flat tensor, and of views that follow.
  const c10::StorageImpl* storage() const { return storage_.unsafeGetStorageImpl(); }
  /// The storage of the listed views while this is closed.
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
  bool of_pool_ = false;  ///< whether its memory is from the pool
};

}  // namespace lockstep
