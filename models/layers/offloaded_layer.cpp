#include "lockstep/models/offloaded_layer.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

namespace lockstep {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;

constexpr size_t kLeastBytesOfRow = 4;

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

class StorageWatch;
thread_local StorageWatch* current_storages = nullptr;

/// The memory of an operator's arguments.
struct Arguments : at::ObserverContext {
  std::vector<const c10::StorageImpl*> storages;
};

/// Finds the device memory that operators of this thread return: results that are not their
/// arguments and were not arguments of an outermost operator. Inside an operator, libtorch makes
/// memory without calling one.
class StorageWatch {
 public:
  explicit StorageWatch(c10::Device device)
      : device_(device),
        outer_(std::exchange(current_storages, this)),
        handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(on_call, on_return)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {}
  ~StorageWatch() {
    at::removeCallback(handle_);
    current_storages = outer_;
  }
  StorageWatch(const StorageWatch&) = delete;
  StorageWatch& operator=(const StorageWatch&) = delete;

  std::vector<WeakStorage> take() { return std::move(made_); }

 private:
  static std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
    if (!current_storages) return nullptr;
    auto arguments = std::make_unique<Arguments>();
    const bool outermost = current_storages->depth_++ == 0;
    const auto note = [&](const at::Tensor& tensor) {
      arguments->storages.push_back(storage_of(tensor));
      if (outermost) current_storages->know(tensor);
    };
    for (const c10::IValue& argument : call.inputs()) current_storages->visit(argument, note);
    return arguments;
  }

  static void on_return(const at::RecordFunction& call, at::ObserverContext* context) {
    const auto* const arguments = static_cast<const Arguments*>(context);
    if (!current_storages || !arguments) return;
    --current_storages->depth_;
    const auto& given = arguments->storages;
    const auto note = [&](const at::Tensor& tensor) {
      const bool is_new = std::find(given.begin(), given.end(), storage_of(tensor)) == given.end();
      if (is_new && current_storages->know(tensor))
        current_storages->made_.push_back(tensor.storage().getWeakStorageImpl());
    };
    for (const c10::IValue& result : call.outputs()) current_storages->visit(result, note);
  }

  template <class Note>
  void visit(const c10::IValue& value, const Note& note) const {
    if (value.isList())
      for (const c10::IValue& item : value.toListRef()) visit(item, note);
    if (!value.isTensor()) return;
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage() && tensor.device() == device_) note(tensor);
  }

  /// Whether the tensor's memory is new. A weak reference keeps its address from being reused.
  bool know(const at::Tensor& tensor) {
    return known_.try_emplace(storage_of(tensor), tensor.storage().getWeakStorageImpl()).second;
  }

  c10::Device device_;
  StorageWatch* outer_;
  at::CallbackHandle handle_;
  int depth_ = 0;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> known_;
  std::vector<WeakStorage> made_;
};

at::Tensor bytes_of(const StoragePtr& storage) {
  const auto options = at::TensorOptions(storage->device()).dtype(at::kByte);
  at::Tensor bytes = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(storage), options.computeDispatchKey(), options.dtype());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage->nbytes())});
  return bytes;
}

/// The memory of a layer that autograd keeps.
class OffloadedLayer final : public ActivationOffload::Link {
 public:
  OffloadedLayer(std::vector<StoragePtr> kept, c10::Device device, ActivationOffload& offload)
      : Link(offload.leave_last()),
        to_device_(offload.to_device()),
        stream_(current_stream(device)),
        copied_(device.type()) {
    follow(offload.to_host(), stream_);
    for (StoragePtr& storage : kept) {
      const at::Tensor bytes = bytes_of(storage);
      Piece& piece = pieces_.emplace_back();
      piece.host = host_memory(bytes);
      copy(piece.host, bytes, offload.to_host());
      piece.storage = WeakStorage(storage);
      piece.held = std::move(storage);
    }
    copied_.record(offload.to_host());
  }

  /// Waits for a copy that may be under way: after this the memory is reused.
  ~OffloadedLayer() override {
    if (place_ == Place::host || place_ == Place::taken) return;
    try {
      last_copy().block(stream_);
    } catch (const std::exception&) {
      // The device has failed and reports it to its next user.
    }
  }

  void leave() override {
    if (place_ != Place::leaving) return;
    copied_.block(stream_);
    for (Piece& piece : pieces_) {
      piece.held->set_data_ptr_noswap(c10::DataPtr(nullptr, piece.held->device()));
      piece.held.reset();
    }
    place_ = Place::host;
  }

  /// For the layer's backward, on the current stream.
  void take() {
    if (place_ == Place::taken) return;
    fetch_for_use();
    last_copy().block(current_stream(to_device_.device()));
    pieces_.clear();
    place_ = Place::taken;
  }

 private:
  enum class Place { leaving, host, fetched, taken };

  struct Piece {
    WeakStorage storage = WeakStorage(StoragePtr());
    StoragePtr held;  ///< while a copy may be under way
    at::Tensor host;
  };

  c10::Event& last_copy() { return fetched_ ? *fetched_ : copied_; }

  void fetch() override {
    if (place_ != Place::host) return;
    stream_ = current_stream(to_device_.device());
    const c10::DeviceGuard guard(to_device_.device());  // the allocator takes the current device
    for (Piece& piece : pieces_) {
      piece.held = piece.storage.lock();
      if (piece.held)
        piece.held->set_data_ptr_noswap(piece.held->allocator()->allocate(piece.held->nbytes()));
    }
    follow(to_device_, stream_);  // which may have used this memory before
    copied_.block(to_device_);
    for (const Piece& piece : pieces_)
      if (piece.held) copy(bytes_of(piece.held), piece.host, to_device_);
    fetched_.emplace(to_device_.device_type());
    fetched_->record(to_device_);
    place_ = Place::fetched;
  }

  c10::Stream to_device_;
  c10::Stream stream_;  ///< the stream that owns the pieces on the device
  c10::Event copied_;
  std::optional<c10::Event> fetched_;
  std::vector<Piece> pieces_;
  Place place_ = Place::leaving;
};

}  // namespace

at::Tensor run_offloaded(ActivationOffload& offload, at::Tensor input, bool owns_input,
                         const std::function<at::Tensor(const at::Tensor&)>& layer) {
  if (!at::GradMode::is_enabled() || !offload.takes(input)) return layer(input);
  const c10::Device device = input.device();
  const auto rows = static_cast<size_t>(input.numel() / std::max<int64_t>(input.size(-1), 1));
  std::vector<WeakStorage> made;
  at::Tensor output;
  {
    StorageWatch watch(device);
    output = layer(input);
    made = watch.take();
  }
  if (owns_input) made.push_back(input.storage().getWeakStorageImpl());
  input.reset();
  std::vector<StoragePtr> kept;
  for (const WeakStorage& weak : made) {
    StoragePtr storage = weak.lock();
    const bool others_have_it = storage && storage.use_count() > 1;
    if (others_have_it && storage.get() != storage_of(output) && storage->allocator() &&
        storage->nbytes() >= kLeastBytesOfRow * rows)
      kept.push_back(std::move(storage));
  }
  if (!output.requires_grad()) return output;
  const at::NoGradGuard no_grad;
  const auto kept_layer = std::make_shared<OffloadedLayer>(std::move(kept), device, offload);
  offload.append(kept_layer);
  output.register_hook([kept_layer](const at::Tensor&) { kept_layer->take(); });
  return output;
}

}  // namespace lockstep
