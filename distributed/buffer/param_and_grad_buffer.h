#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"
#include "lockstep/distributed/param_layout.h"
#include "lockstep/distributed/shard_ranges.h"

namespace lockstep {

class BlockPool;
class LentStorage;

/// What a buffer takes over.
enum class BufferContents {
  params_and_grads,
  grads,  ///< the parameters stay where they are, and may have several dtypes
  /// The same, and param.grad() stays what it is until adopt_grad() or attach_grad().
  unattached_grads,
};

/// Which part of a sharded buffer has memory only while it is in use. What remains otherwise is
/// this rank's shard.
enum class LentMemory { none, grads, params_and_grads };

/// How a buffer's memory is lent, and from where.
struct Lending {
  LentMemory memory = LentMemory::none;
  std::shared_ptr<BlockPool> pool = nullptr;  ///< null: nothing is lent
};

/// Stage 2 of a gradient's path: one contiguous piece of memory for parameters of one dtype, and
/// one for their gradients. Parameters and gradients are views of them, so nothing is copied before
/// or after communication, and the optimizer can walk one flat range.
///
/// Gradients may have a wider dtype than their parameters (fp32 for bf16): autograd accumulates
/// into the view in place and converts on the way.
class ParamAndGradBuffer {
 public:
  /// Allocates both pieces, moves the parameters' values in and makes each parameter a view.
  /// `params` share dtype and device, are leaves that require a gradient, and are given in the
  /// order of registration. UsageError names a parameter that breaks this. With
  /// options.distributed_optimizer this rank owns shard `shard` of each bucket, counted among
  /// options.data_parallel_size; otherwise it owns all.
  ///
  /// `lending`, for a layout of one bucket that is cut among several ranks: gradients have no
  /// memory at first, see open_grads(). Parameters have memory until lent_params() is closed. The
  /// shard has their values after keep_param_shard().
  ParamAndGradBuffer(std::vector<NamedParameter> params, at::ScalarType grad_dtype,
                     const LayoutOptions& options, int64_t shard = 0,
                     BufferContents contents = BufferContents::params_and_grads,
                     const Lending& lending = {});

  ~ParamAndGradBuffer();
  ParamAndGradBuffer(const ParamAndGradBuffer&) = delete;
  ParamAndGradBuffer& operator=(const ParamAndGradBuffer&) = delete;

  /// Parameters in the order of registration; indices below refer to it.
  const std::vector<NamedParameter>& params() const { return params_; }
  const ParamLayout& layout() const { return layout_; }

  /// All parameters [layout().numel elements]; gaps between them are zero. Undefined for a buffer
  /// of gradients alone. Where memory is lent, neither this nor grad_data() may be read while the
  /// memory is closed.
  const at::Tensor& param_data() const { return param_data_; }
  /// All gradients [layout().numel elements]; gaps are zero.
  const at::Tensor& grad_data() const { return grad_data_; }
  /// The gradient of parameter `index`, in its shape.
  const at::Tensor& grad_view(size_t index) const { return views_[index].grad; }

  /// The elements that this rank's optimizer updates, and whose reduced gradients it holds, in
  /// coordinates of the buffer: with the distributed optimizer one range for each bucket, otherwise
  /// one range of all. If these are not all elements, the other gradients are this rank's own
  /// terms, which have no meaning after the reduction.
  const std::vector<ElementRange>& owned() const { return owned_; }
  /// Elements of owned().
  int64_t owned_numel() const;
  /// Whether buckets are cut for the distributed optimizer.
  bool is_sharded() const { return sharded_; }
  /// Whether it was made with options.whole_parameters: for matrices that Muon updates.
  bool holds_whole_matrices() const { return whole_matrices_; }

  /// The elements whose reduced gradients this rank holds: owned(), or all of them after
  /// note_all_reduced(true).
  const std::vector<ElementRange>& reduced() const { return all_reduced_ ? all_ : owned_; }
  void note_all_reduced(bool all) { all_reduced_ = all; }
  bool all_reduced() const { return all_reduced_; }

  /// What the optimizer works on, flat: the parameters in a range inside one of owned(), and the
  /// gradients in a range inside one of reduced().
  at::Tensor owned_params(ElementRange range) const;
  at::Tensor held_grads(ElementRange range) const;

  /// Whether gradients, or parameters too, have memory only while they are used.
  bool lends_grads() const { return lent_grads_ != nullptr; }
  bool lends_params() const { return lent_params_ != nullptr; }
  LentStorage& lent_params() { return *lent_params_; }

  /// Bytes that parameters and gradients always occupy: those of the whole, or those of this rank's
  /// shard where memory is lent. Lent memory comes from pool(), which is null if nothing is lent.
  int64_t kept_param_bytes() const;
  int64_t kept_grad_bytes() const;
  const BlockPool* pool() const { return pool_.get(); }

  /// With lends_grads(): gives the gradients memory. The gaps are zero, and a gradient has a value
  /// once adopt_grad() has copied it in. adopt_grad() calls it.
  void open_grads();
  /// The same, and gradients that have no value become zero. Call it before a reduction.
  void complete_grads();
  /// Frees the memory; param.grad() becomes undefined.
  void close_grads();

  /// With lends_params(): copies the parameters' current values to the shard. The parameters must
  /// have memory.
  void keep_param_shard();
  /// Whether parameter `index` is a view of the buffer, whether the buffer is open or not.
  bool holds_param(size_t index) const;

  /// Moves the gradients to the host's memory, page-locked where the device is CUDA, and frees the
  /// device's. Until restore_grads(), reading a gradient throws c10::Error. Both do nothing if that
  /// is done already.
  void offload_grads();
  void restore_grads();
  bool grads_offloaded() const { return host_grads_.defined(); }

  /// Sets all gradients to zero and makes param.grad() the view again, even if it was replaced.
  /// Where gradient memory is lent, calls close_grads() instead.
  void zero_grad();

  /// Makes sure that the gradient of parameter `index` is in the buffer. Call it after autograd has
  /// accumulated the gradient. If param.grad() is another tensor (because somebody set it to none
  /// or replaced it before backward), its value is copied in and the view is restored. A gradient
  /// that is undefined adds nothing to the buffer. UsageError if param.grad() is sparse or has
  /// another shape.
  void adopt_grad(size_t index);

  /// Copies param.grad() of parameter `index` into the buffer, and leaves param.grad() as it is.
  /// UsageError as above, and if there is none.
  void copy_grad_in(size_t index);

  /// Makes param.grad() of parameter `index` the view, whatever it was.
  void attach_grad(size_t index) { attach_grad(views_[index]); }

  /// Throws UsageError naming the first parameter whose gradient is no longer the view, and
  /// `zero_call`, which zeroes gradients. Gradients that are undefined get their view back.
  void check_grads_attached(const char* zero_call = "zero_grad_buffer");
  /// The same for parameter `index`.
  void check_grad_attached(size_t index, const char* zero_call = "zero_grad_buffer");

 private:
  /// What a backward needs of a parameter, kept close together.
  struct Views {
    at::Tensor param;
    at::Tensor grad;
  };

  void lend(const Lending& lending, int64_t shards);
  void set_grad_storage(const c10::Storage& storage);
  static void attach_grad(Views& views) { views.param.mutable_grad() = views.grad; }

  std::vector<NamedParameter> params_;
  ParamLayout layout_;
  bool sharded_;
  bool whole_matrices_;
  std::vector<ElementRange> owned_;
  std::vector<ElementRange> all_;  ///< one range of all elements
  bool all_reduced_ = false;
  at::Tensor param_data_;
  at::Tensor grad_data_;
  at::Tensor host_grads_;      ///< while they are offloaded
  c10::Storage grad_storage_;  ///< of grad_data_, meanwhile without memory
  std::vector<Views> views_;
  /// Where memory is lent: this rank's shards, and the memory that is lent and freed.
  at::Tensor param_shard_, grad_shard_;
  std::shared_ptr<BlockPool> pool_;
  std::unique_ptr<LentStorage> lent_params_, lent_grads_;
  std::vector<bool> has_grad_;           ///< of each parameter, while gradients have memory
  std::vector<ElementRange> gaps_ = {};  ///< between parameters, while something is lent
};

}  // namespace lockstep
