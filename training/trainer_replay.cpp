#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/fingerprint.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

std::vector<std::string> names_of(const std::vector<DistributedDataParallel*>& models) {
  std::vector<std::string> names;
  for (const DistributedDataParallel* model : models)
    for (const ParamAndGradBuffer* buffer : model->buffers())
      for (const NamedParameter& param : buffer->params()) names.push_back(param.name);
  return names;
}

}  // namespace

bool Trainer::replay_is_due(int64_t iteration) const {
  const std::optional<int64_t>& interval = config_.train.replay_interval;
  if (parallel_state_.device().is_meta()) return false;  // a planned rank has no values
  return interval && iteration <= config_.train.train_iters && iteration % *interval == 0;
}

std::vector<int64_t> Trainer::gradient_fingerprints(int64_t rank) {
  std::unique_ptr<MicrobatchLoader>& loader = replay_loaders_[rank];
  if (!loader)
    loader = std::make_unique<MicrobatchLoader>(
        open_sources(config_).training, batches_,
        MicrobatchLoader::Options{
            .seq_length = config_.model.seq_length, .rank = rank, .ranks = data_parallel_size_});
  loader->seek(consumed_samples_ + left_out_samples_);
  model_->zero_grad_buffer();
  model_->backward_locally(optimizer_->loss_scale(),
                           [&](int64_t) { return batch_input(loader->next()); });
  std::vector<at::Tensor> each;
  for (const DistributedDataParallel* model : model_->wrappers())
    for (const ParamAndGradBuffer* buffer : model->buffers())
      for (size_t i = 0; i < buffer->params().size(); ++i)
        each.push_back(kernels::fingerprint(buffer->grad_view(i)));
  const at::Tensor all = at::stack(each).cpu();
  model_->forget_fp8_values();
  model_->zero_grad_buffer();
  const auto* const values = all.const_data_ptr<int64_t>();
  return {values, values + all.numel()};
}

void Trainer::replay() {
  settle();
  const ProcessGroup group = parallel_state_.group(GroupKind::dp);
  const int64_t neighbour = (data_parallel_rank_ + 1) % data_parallel_size_;
  const std::vector<int64_t> own = gradient_fingerprints(data_parallel_rank_);
  const std::vector<int64_t> again = gradient_fingerprints(neighbour);
  const auto count = static_cast<int64_t>(own.size());
  const at::Tensor mine = at::tensor(own, at::kLong);
  const at::Tensor of_ranks = at::empty({group.size() * count}, at::kLong);
  all_gather(group, of_ranks, mine, "fingerprints of gradients").wait();
  const int64_t* const expected = of_ranks.const_data_ptr<int64_t>() + neighbour * count;
  std::vector<size_t> differing;
  for (size_t i = 0; i < again.size(); ++i)
    if (again[i] != expected[i]) differing.push_back(i);
  std::string text;
  if (!differing.empty()) {
    const int64_t other = group.ranks()[static_cast<size_t>(neighbour)];
    const std::string others =
        differing.size() == 1 ? "" : fmt::format(" and {} others", differing.size() - 1);
    const std::string from = other == parallel_state_.rank()
                                 ? "in its first pass"
                                 : fmt::format("rank {}, whose micro-batch it is", other);
    text = fmt::format("rank {} of '{}'{} than {}", parallel_state_.rank(),
                       names_of(model_->wrappers())[differing.front()], others, from);
  }
  std::vector<std::string> found = all_gather_texts(parallel_state_.world(), text, "replay");
  std::erase(found, "");
  require<CommunicationError>(found.empty(), "before iteration {}: {}: {}", iteration_ + 1,
                              data_parallel_size_ == 1
                                  ? "a second pass has computed different gradients from the same "
                                    "samples"
                                  : "two ranks have computed different gradients from the same "
                                    "samples",
                              fmt::join(found, "; "));
}

}  // namespace lockstep
