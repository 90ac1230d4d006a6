// 1,000 random models under DistributedDataParallel, finalize_model_grads and both optimizers:
// uneven cuts, partial and tied parameters over every axis, usage that changes.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/distributed/drawn_model.h"

namespace lockstep {
namespace {

using testing::DrawnModel;
using testing::gradient_tolerance;
using testing::GridPlace;
using testing::ModelParam;
using testing::RandomCase;

/// Bytes that a rank sends, by the ranks that take part.
using SentBytes = std::map<RankList, int64_t>;

/// One rank's part of a model, trained for two steps.
class TrainedModel {
 public:
  TrainedModel(const DrawnModel& model, const ParallelState& state, RandomCase& one)
      : model_(model), state_(state), one_(one) {
    for (int64_t chunk = 0; chunk < model.chunks; ++chunk) add_chunk(chunk);
    OptimizerConfig config;
    config.optimizer = OptimizerKind::sgd;
    config.lr = 1;
    config.sgd_momentum = config.weight_decay = config.clip_grad = 0;
    optimizer_ = make_optimizer(ddps(), config);
  }

  void step(int64_t step) {
    for (const auto& ddp : ddps_) {
      if (model_.counted) ddp->set_num_microbatches(model_.microbatches);
      if (model_.config.use_distributed_optimizer)
        ddp->set_force_all_reduce(model_.force_all_reduce && step == 1);
      ddp->zero_grad_buffer();
    }
    for (int64_t m = 0; m < model_.microbatches; ++m) run_backward({step, m, model_.microbatches});
    const size_t calls_before = one_.calls.size();
    const FinalizeReport report = finalize_model_grads(ddps(), tokens());
    check_gradients(step);
    check_communication(report, calls_before);
    one_.compare(optimizer_->step().grad_norm, model_.gradient_norm(step), norm_tolerance(),
                 fmt::format("norm of step {}", step));
    check_weights(step);
  }

 private:
  /// A copy of a parameter on this rank.
  struct Held {
    const ModelParam* param;
    int64_t copy;
    int64_t chunk;
    at::Tensor tensor;
    at::Tensor weight;    ///< the oracle's value, fp64
    at::Tensor gradient;  ///< of this step
  };

  void add_chunk(int64_t chunk) {
    std::vector<NamedParameter> named;
    for (const ModelParam& param : model_.params)
      for (size_t i = 0; i < param.copies.size(); ++i) {
        if (param.copies[i].stage != model_.grid.stage(state_.rank())) continue;
        if (param.copies[i].chunk != chunk) continue;
        const at::Tensor weight = initial_weight(param.drawn, place(param));
        at::Tensor tensor = weight.to(param.drawn.dtype).clone();
        tensor.requires_grad_(param.drawn.trained);
        named.push_back({param.drawn.name(), tensor, param.description()});
        held_.push_back({&param, static_cast<int64_t>(i), chunk, tensor, weight, {}});
      }
    ddps_.push_back(std::make_unique<DistributedDataParallel>(named, state_, model_.config,
                                                              /*disable_bucketing=*/chunk > 0));
  }

  GridPlace place(const ModelParam& param) const {
    return model_.grid.place(state_.rank(), param.expert);
  }
  std::vector<DistributedDataParallel*> ddps() const {
    std::vector<DistributedDataParallel*> result;
    for (const auto& ddp : ddps_) result.push_back(ddp.get());
    return result;
  }
  std::optional<at::Tensor> tokens() const {
    if (!model_.per_token) return std::nullopt;
    const int64_t stage = model_.grid.stage(state_.rank());
    if (stage + 1 == model_.grid.stages()) return at::full({}, model_.tokens(state_.rank()));
    if (stage % 2 == 1) return std::nullopt;
    return at::full({}, 9999);  // which is ignored
  }
  double norm_tolerance() const {
    for (const ModelParam& param : model_.params)
      if (gradient_tolerance(param.drawn.dtype, model_.divisor(param)) > 1e-12) return 1e-5;
    return 1e-12;
  }

  void run_backward(const testing::Moment& moment) {
    std::vector<DistributedDataParallel::NoSyncGuard> guards;
    if (!model_.counted && moment.microbatch + 1 < moment.microbatches)
      for (const auto& ddp : ddps_) guards.push_back(ddp->no_sync());
    for (int64_t chunk = model_.chunks; chunk-- > 0;) loss_of_chunk(chunk, moment).backward();
  }

  at::Tensor loss_of_chunk(int64_t chunk, const testing::Moment& moment) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const Held& held : held_) {
      if (held.chunk != chunk || !held.param->drawn.trained) continue;
      const at::Tensor term =
          loss_of(held.param->drawn, held.tensor, place(*held.param), held.copy, moment);
      if (term.defined()) loss = loss + term;
    }
    return loss;
  }

  Held& held_in(size_t chunk, const std::string& name) {
    for (Held& held : held_)
      if (held.chunk == static_cast<int64_t>(chunk) && held.param->drawn.name() == name)
        return held;
    throw std::out_of_range(name);
  }

  /// Calls `visit(held, buffer, index of the parameter in it)` for every trained parameter.
  template <class Visit>
  void visit_grads(Visit visit) {
    for (size_t chunk = 0; chunk < ddps_.size(); ++chunk)
      for (const auto& buffer : ddps_[chunk]->buffers())
        for (size_t i = 0; i < buffer->params().size(); ++i)
          visit(held_in(chunk, buffer->params()[i].name), *buffer, i);
  }

  /// The elements of parameter `index` whose final gradients this rank holds.
  static std::vector<ElementRange> final_ranges(const ParamAndGradBuffer& buffer, size_t index) {
    const auto& slot = buffer.layout().slots[index];
    std::vector<ElementRange> ranges;
    for (const ElementRange& range : buffer.reduced()) {
      const int64_t start = std::max(range.start, slot.start), end = std::min(range.end, slot.end);
      if (start < end) ranges.push_back({start - slot.start, end - slot.start});
    }
    return ranges;
  }

  void check_gradients(int64_t step) {
    for (Held& held : held_) held.gradient = model_.gradient(*held.param, state_.rank(), step);
    visit_grads([&](const Held& held, const ParamAndGradBuffer& buffer, size_t i) {
      const DrawnModel& model = model_;
      const at::Tensor found = buffer.grad_view(i).flatten(), wanted = held.gradient.flatten();
      for (const ElementRange& range : final_ranges(buffer, i))
        one_.compare(found.slice(0, range.start, range.end),
                     wanted.slice(0, range.start, range.end),
                     gradient_tolerance(held.param->drawn.dtype, model.divisor(*held.param)),
                     fmt::format("gradient of {} in step {}, from {}", held.param->drawn.name(),
                                 step, range.start));
    });
  }

  /// The bytes that must be sent after the reduction over data-parallel ranks: partial gradients
  /// over their axes, and tied ones once among the stages that hold them.
  SentBytes wanted_bytes() {
    SentBytes bytes;
    std::vector<const ModelParam*> tied;
    visit_grads([&](const Held& held, const ParamAndGradBuffer& buffer, size_t i) {
      int64_t size = 0;
      for (const ElementRange& range : final_ranges(buffer, i)) size += range.numel();
      size *= static_cast<int64_t>(buffer.grad_data().element_size());
      const ModelParam& param = *held.param;
      const int64_t rank = state_.rank();
      for (size_t axis = 0; axis < (param.expert ? 2u : 1u); ++axis) {
        const testing::AxisRole role = param.drawn.axes[axis].role;
        if (role == testing::AxisRole::sum || role == testing::AxisRole::mean)
          bytes[model_.grid.along(rank, axis, param.expert)] += size;
      }
      RankList stages = model_.grid.along(rank, 3, false);
      if (param.over_stages) bytes[stages] += size;
      if (!param.tie || std::count(tied.begin(), tied.end(), &param) > 0) return;
      tied.push_back(&param);
      if (param.tie->stages == TiedStages::first) return;
      if (param.tie->stages == TiedStages::first_and_last && stages.size() > 1)
        stages = {stages.front(), stages.back()};
      bytes[stages] += size;
    });
    std::erase_if(bytes,
                  [](const auto& entry) { return entry.first.size() == 1 || entry.second == 0; });
    return bytes;
  }

  void check_communication(const FinalizeReport& report, size_t calls_before) {
    const SentBytes wanted = wanted_bytes();
    SentBytes entries;
    for (const FinalizeReport::Entry& entry : report.entries)
      if (entry.pass == "partial gradients" || entry.pass == "tied gradients")
        entries[entry.group.ranks()] += entry.bytes;
    one_.require(entries == wanted,
                 fmt::format("the report has {} instead of {}", entries, wanted));
    SentBytes sent;
    for (size_t i = calls_before; i < one_.calls.size(); ++i)
      if (one_.calls[i].label.starts_with("gradient"))
        sent[one_.calls[i].ranks] += one_.calls[i].bytes;
    one_.require(sent == wanted, fmt::format("{} was sent instead of {}", sent, wanted));
    one_.require(report.num_tokens.defined() == model_.per_token, "tokens of the report");
    if (report.num_tokens.defined())
      one_.compare(report.num_tokens.item<double>(), static_cast<double>(model_.loss_divisor()), 0,
                   "number of tokens");
  }

  void check_weights(int64_t step) {
    for (Held& held : held_) {
      const at::ScalarType dtype = held.param->drawn.dtype;
      held.weight -= held.gradient;
      double tolerance = gradient_tolerance(dtype, model_.divisor(*held.param));
      if (tolerance > 0 && dtype == at::kBFloat16) tolerance = 2;  // rounded to 8 bits
      const at::Tensor wanted = dtype == at::kDouble ? held.weight : held.weight.to(at::kFloat);
      one_.compare(held.tensor, wanted.to(dtype), tolerance,
                   fmt::format("weight {} after step {}", held.param->drawn.name(), step));
    }
  }

  const DrawnModel& model_;
  const ParallelState& state_;
  RandomCase& one_;
  std::vector<Held> held_;
  std::vector<std::unique_ptr<DistributedDataParallel>> ddps_;
  std::unique_ptr<Optimizer> optimizer_;
};

ParallelSizes world_of(int64_t ranks, ParallelSizes sizes) {
  sizes.world_size = ranks;
  return sizes;
}

const std::vector<ParallelSizes>& worlds() {
  static const std::vector<ParallelSizes> list = {
      world_of(1, {}),
      world_of(2, {}),
      world_of(2, {.tensor = 2}),
      world_of(2, {.pipeline = 2}),
      world_of(3, {.tensor = 3}),
      world_of(3, {.expert = 3}),
      world_of(3, {.pipeline = 3}),
      world_of(4, {.tensor = 2}),
      world_of(4, {.pipeline = 2, .context = 2}),
      world_of(4, {.tensor = 2, .pipeline = 2}),
      world_of(4, {.optimizer_instances = 2}),
      world_of(4, {.tensor = 2, .expert = 2, .expert_tensor = 1}),
      world_of(4, {.expert = 2, .optimizer_instances = 2}),
      world_of(5, {}),
      world_of(6, {.tensor = 3, .context = 2}),
      world_of(6, {.tensor = 2, .expert = 3, .expert_tensor = 1}),
      world_of(6, {.pipeline = 3}),
      world_of(6, {.tensor = 2, .pipeline = 3, .expert = 2, .expert_tensor = 1}),
      world_of(8, {.tensor = 2, .pipeline = 2, .context = 2, .expert = 2}),
      world_of(8, {.tensor = 2, .expert = 2, .expert_tensor = 2, .optimizer_instances = 2}),
  };
  return list;
}

TEST(RandomDistributedDataParallel, GradientsNormWeightsAndCommunicationOfAThousandModels) {
  testing::run_random_cases(1000, worlds(), [](const ParallelState& state, RandomCase& one) {
    const DrawnModel model(one.seed, state.grids().sizes());
    one.text = model.text();
    TrainedModel trained(model, state, one);
    for (int64_t step = 0; step < 2; ++step) trained.step(step);
  });
}

}  // namespace
}  // namespace lockstep
