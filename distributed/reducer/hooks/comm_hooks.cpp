#include "lockstep/distributed/comm_hooks.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/narrow_dtype.h"
#include "lockstep/distributed/sparse_all_reduce.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

std::string GradBucket::label() const {
  return fmt::format("bucket {} ('{}' to '{}')", index, parameters->front().name,
                     parameters->back().name);
}

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> parts;
  int64_t offset = 0;
  for (const NamedParameter& param : *parameters) {
    const int64_t numel = param.tensor.numel();
    parts.push_back(buffer.narrow(0, offset, numel).view(param.tensor.sizes()));
    offset += numel;
  }
  return parts;
}

CommHook::Finish AllReduceHook::start(const GradBucket& bucket) {
  if (bucket.buffer.layout() == at::kSparse)
    return start_sparse_all_reduce(bucket.group, bucket.buffer, bucket.sparse_rows, bucket.divisor,
                                   bucket.label());
  Work work =
      all_reduce(bucket.group, bucket.buffer, {ReduceOp::sum, 1, bucket.divisor}, bucket.label());
  return [work, buffer = bucket.buffer]() mutable {
    work.wait();
    return buffer;
  };
}

CompressHook::CompressHook(at::ScalarType dtype, std::shared_ptr<CommHook> inner)
    : dtype_(dtype), inner_(std::move(inner)) {
  require<ConfigError>(is_narrow(dtype), "compress hook: found {}, allowed: Half, BFloat16",
                       at::toString(dtype));
  require<ConfigError>(inner_ != nullptr, "compress hook: found no inner hook");
}

std::string CompressHook::text_around(const std::string& inner) const {
  return fmt::format("{}-compress({})", dtype_ == at::kHalf ? "fp16" : "bf16", inner);
}

std::string CompressHook::name() const { return text_around(inner_->name()); }

std::string CompressHook::identity() const { return text_around(inner_->identity()); }

CommHook::Finish CompressHook::start(const GradBucket& bucket) {
  if (bucket.buffer.layout() == at::kSparse) return inner_->start(bucket);
  GradBucket compressed = bucket;
  compressed.buffer = bucket.buffer.to(dtype_);
  Finish finish = inner_->start(compressed);
  if (!finish) return nullptr;
  return [finish = std::move(finish), buffer = bucket.buffer] {
    const at::Tensor result = finish();
    // The bucket refuses another size, which copy_() might expand.
    if (!result.defined() || result.numel() != buffer.numel()) return result;
    return at::Tensor(buffer).copy_(result.reshape(-1));
  };
}

FunctionHook::FunctionHook(std::string name, Function function)
    : name_(std::move(name)), function_(std::move(function)) {
  require<ConfigError>(function_ != nullptr, "hook '{}': found no function", name_);
}

}  // namespace lockstep
