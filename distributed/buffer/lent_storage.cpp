#include "lockstep/distributed/lent_storage.h"

#include "lockstep/distributed/closed_storage.h"

namespace lockstep {

LentStorage::LentStorage(at::Tensor flat, std::vector<at::Tensor> views, const std::string& message,
                         std::shared_ptr<BlockPool> pool)
    : flat_(std::move(flat)),
      views_(std::move(views)),
      pool_(std::move(pool)),
      storage_(flat_.storage()),
      closed_(closed_twin(storage_, message.c_str())) {}

void LentStorage::allocate() {
  if (has_memory_) return;
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(pool_->take(storage_.nbytes()));
  has_memory_ = of_pool_ = true;
}

void LentStorage::open() {
  allocate();
  if (!open_) switch_views(closed_, storage_);
  open_ = true;
}

void LentStorage::close(OtherViews others) {
  if (!has_memory_) return;
  if (open_) switch_views(storage_, closed_);
  constexpr size_t kOwnReferences = 2;  // storage_ and that of the flat tensor
  if (others == OtherViews::follow || storage_.use_count() == kOwnReferences) {
    release();
  } else {
    if (of_pool_) pool_->lose(storage_.data());
    storage_ = c10::Storage(c10::Storage::use_byte_size_t(), storage_.nbytes(),
                            c10::DataPtr(nullptr, storage_.device()), storage_.allocator(),
                            /*resizable=*/false);
    set_storage_of(flat_, storage_);
  }
  open_ = has_memory_ = of_pool_ = false;
}

void LentStorage::release() {
  c10::DataPtr data =
      storage_.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, storage_.device()));
  if (of_pool_) pool_->give(std::move(data));
}

void LentStorage::switch_views(const c10::Storage& from, const c10::Storage& to) {
  for (const at::Tensor& view : views_)
    if (view.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() ==
        from.unsafeGetStorageImpl())
      set_storage_of(view, to);
}

void LentStorage::set_message(const std::string& message) {
  closed_.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

}  // namespace lockstep
