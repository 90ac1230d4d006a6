#include "lockstep/distributed/closed_storage.h"

namespace lockstep {

c10::Storage closed_twin(const c10::Storage& storage, const char* message) {
  c10::Storage twin(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(nullptr, storage.device()), /*allocator=*/nullptr,
                    /*resizable=*/false);
  twin.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  return twin;
}

void set_storage_of(const at::Tensor& tensor, const c10::Storage& storage) {
  tensor.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
}

}  // namespace lockstep
