#include <cstring>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_registration.h"
#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/device_storage.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/operator_kernels.h"

namespace lockstep::testing {
namespace {

using OptionalDtype = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<c10::Device>;

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

c10::Device resolved(const OptionalDevice& device) {
  return device && device->has_index() ? *device : device_at(current_device());
}

void check_strided(const OptionalLayout& layout, const std::optional<bool>& pinned) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "lagging device: found layout ",
              *layout, ", allowed: Strided");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty_contiguous(at::IntArrayRef size, OptionalDtype dtype, OptionalLayout layout,
                            OptionalDevice device, std::optional<bool> pinned,
                            std::optional<at::MemoryFormat> format) {
  check_strided(layout, pinned);
  const c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, device_allocator(), kDeviceKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, OptionalDtype dtype,
                         OptionalLayout layout, OptionalDevice device, std::optional<bool> pinned) {
  check_strided(layout, pinned);
  return empty_on_device(size, stride, c10::dtype_or_default(dtype), resolved(device));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous,
              "lagging device: resize_ to memory format ", *format, ", allowed: Contiguous");
  if (self.sizes() != size) resize_tensor(self, size, c10::contiguous_strides(size));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  const at::DimVector contiguous = c10::contiguous_strides(size);
  const at::IntArrayRef strides = stride.size() == size.size() ? stride : contiguous;
  const size_t needed =
      at::detail::computeStorageNbytes(size, strides, self.itemsize(), static_cast<size_t>(offset));
  TORCH_CHECK(needed <= source.nbytes(), "lagging device: set_ to ", needed,
              " bytes of a storage of ", source.nbytes());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_storage(self, empty_on_device({0}, {1}, self.scalar_type(), self.device()).storage(),
                     0, {0}, {1});
}

}  // namespace

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                           c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kDeviceKeys, dtype);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr larger = device_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0)
    enqueue(current_stream(storage.device().index()), "resize_storage",
            [to = larger.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); });
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const size_t needed = at::detail::computeStorageNbytes(
      sizes, strides, tensor.itemsize(), static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

void add_view_kernels(torch::Library& library) {
  library.impl("empty.memory_format", TORCH_FN(empty_contiguous));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_", TORCH_FN(set_empty));
}

}  // namespace lockstep::testing
