// 200 random lists of gradients for all_reduce_grads: uneven and empty parts, gradients that are
// missing on some or all ranks, strided or expanded ones.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/tests/distributed/drawn_mesh.h"

namespace lockstep {
namespace {

using testing::AxisRole;
using testing::AxisShare;
using testing::Draw;
using testing::DrawnMesh;
using testing::DrawnParam;
using testing::gradient_tolerance;
using testing::GridPlace;
using testing::RandomCase;
using testing::Usage;

/// The memory of a gradient that does not come from backward.
enum class GradMemory { by_backward, strided, transposed };

/// A random case: parameters on the axes dp and cp, and on tp, which is not reduced.
struct DrawnScript {
  DrawnScript(uint32_t seed, int64_t world) {
    Draw draw(seed);
    mesh = testing::draw_mesh(draw, world, {"dp", "cp", "tp"});
    for (const std::string name : {"dp", "cp", "tp"})
      if (std::count(mesh.names.begin(), mesh.names.end(), name) == 0) {
        mesh.names.push_back(name);
        mesh.sizes.push_back(1);
      }
    use_ddp = draw.one_in(3);
    microbatches = draw.between(1, 3);
    const int64_t count = draw.between(1, 10);
    for (int64_t i = 0; i < count; ++i) add_param(draw);
  }

  /// The ranks over which gradients are averaged.
  RankList group(int64_t rank) const {
    return mesh.ranks_along(rank, [&](size_t axis) {
      return mesh.names[axis] == "cp" || (!use_ddp && mesh.names[axis] == "dp");
    });
  }
  /// Whether any micro-batch of the step gives `rank` a gradient.
  bool has_gradient(const DrawnParam& param, int64_t rank, int64_t step) const {
    for (int64_t m = 0; m < microbatches; ++m)
      if (is_used(param, mesh.place(rank), 0, {step, m, microbatches})) return true;
    return false;
  }
  bool is_reduced(const DrawnParam& param, int64_t rank, int64_t step) const {
    for (const int64_t member : group(rank))
      if (has_gradient(param, member, step)) return true;
    return false;
  }
  at::Tensor mean(const DrawnParam& param, int64_t rank, int64_t step) const {
    at::Tensor sum = at::zeros(local_shape(param, mesh.place(rank)), at::kDouble);
    for (const int64_t member : group(rank))
      sum += local_gradient(param, mesh.place(member), 0, step, microbatches);
    return sum / static_cast<int64_t>(group(rank).size());
  }

  std::string text() const {
    std::string result =
        fmt::format("  {}, use_ddp {}, micro-batches {}\n", mesh.text(), use_ddp, microbatches);
    for (size_t i = 0; i < params.size(); ++i)
      result += fmt::format("  {} memory {}\n", params[i].text(), static_cast<int>(memory[i]));
    return result;
  }

  DrawnMesh mesh;
  bool use_ddp;
  int64_t microbatches;
  std::vector<DrawnParam> params;
  std::vector<GradMemory> memory;

 private:
  void add_param(Draw& draw) {
    DrawnParam param =
        draw_param(draw, static_cast<int64_t>(params.size()), {Usage::always, Usage::now_and_then});
    const auto dims = static_cast<int64_t>(param.shape.size());
    for (const std::string& name : mesh.names) {
      const bool cut = name == "tp" && dims > 0 && draw.one_in(2);
      param.axes.push_back(cut ? AxisShare{AxisRole::cut, draw.below(dims)}
                               : AxisShare{AxisRole::sum});
    }
    memory.push_back(draw.of<GradMemory>(
        {GradMemory::by_backward, GradMemory::strided, GradMemory::transposed}));
    params.push_back(std::move(param));
  }
};

/// The same values in another memory layout.
at::Tensor in_memory(const at::Tensor& gradient, GradMemory memory) {
  if (memory == GradMemory::by_backward || gradient.dim() == 0) return gradient;
  if (memory == GradMemory::transposed)
    return gradient.transpose(0, -1).contiguous().transpose(0, -1);
  return at::stack({gradient, gradient + 1}, -1).select(-1, 0);
}

void check_script_step(const DrawnScript& script, const std::vector<at::Tensor>& tensors,
                       const DeviceMesh& mesh, int64_t rank, int64_t step, RandomCase& one) {
  const auto memory_of = [&](size_t i) { return script.memory[i]; };
  std::vector<at::Tensor> before;
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].mutable_grad().reset();
    for (int64_t m = 0; m < script.microbatches; ++m) {
      const at::Tensor loss = loss_of(script.params[i], tensors[i], script.mesh.place(rank), 0,
                                      {step, m, script.microbatches});
      if (loss.defined()) loss.backward();
    }
    const at::Tensor gradient = tensors[i].grad();
    if (gradient.defined()) tensors[i].mutable_grad() = in_memory(gradient, memory_of(i));
    before.push_back(tensors[i].grad());
  }
  std::vector<MeshParameter> list;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i % 2 == 0)
      list.emplace_back(tensors[i], script.params[i].name());
    else
      list.emplace_back(DTensor::from_local(tensors[i], mesh, placements_of(script.params[i]),
                                            script.params[i].shape),
                        script.params[i].name());
  }
  all_reduce_grads(MeshParameters(list), mesh, script.use_ddp);
  const int64_t ranks = static_cast<int64_t>(script.group(rank).size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const DrawnParam& param = script.params[i];
    const at::Tensor found = tensors[i].grad();
    const std::string what = fmt::format("gradient of {} in step {}", param.name(), step);
    if (!script.is_reduced(param, rank, step)) {
      one.require(!found.defined(), what + ": none was expected");
      continue;
    }
    double tolerance = gradient_tolerance(param.dtype, ranks);
    if (tolerance > 0 && param.dtype == at::kBFloat16) tolerance = .5;  // rounded to 8 bits
    one.compare(found, script.mean(param, rank, step), tolerance, what);
    if (before[i].defined())
      one.require(found.is_same(before[i]), what + ": another tensor than before");
  }
}

/// A rank sends a digest of the list, which gradients it has, and all gradients that any rank has.
void check_script_bytes(const DrawnScript& script, const std::vector<at::Tensor>& tensors,
                        int64_t rank, int64_t step, size_t calls_before, RandomCase& one) {
  std::map<RankList, int64_t> wanted, sent;
  const RankList group = script.group(rank);
  if (group.size() > 1) wanted[group] = 8 + 4 * static_cast<int64_t>(tensors.size());
  for (size_t i = 0; i < tensors.size() && group.size() > 1; ++i)
    if (script.is_reduced(script.params[i], rank, step))
      wanted[group] += static_cast<int64_t>(tensors[i].nbytes());
  for (size_t i = calls_before; i < one.calls.size(); ++i)
    sent[one.calls[i].ranks] += one.calls[i].bytes;
  one.require(sent == wanted, fmt::format("{} was sent instead of {}", sent, wanted));
}

TEST(RandomAllReduceGrads, MeansAndCommunicationOfTwoHundredLists) {
  std::vector<ParallelSizes> worlds;
  for (const int64_t ranks : {1, 2, 3, 4, 4, 5, 6, 8}) {
    worlds.emplace_back();
    worlds.back().world_size = ranks;
  }
  testing::run_random_cases(200, worlds, [](const ParallelState& state, RandomCase& one) {
    const DrawnScript script(one.seed, state.world_size());
    one.text = script.text();
    const DeviceMesh mesh(state, script.mesh.sizes, script.mesh.names);
    std::vector<at::Tensor> tensors;
    for (const DrawnParam& param : script.params)
      tensors.push_back(testing::leaf_of(param, script.mesh.place(state.rank())));
    for (int64_t step = 0; step < 2; ++step) {
      const size_t before = one.calls.size();
      check_script_step(script, tensors, mesh, state.rank(), step, one);
      check_script_bytes(script, tensors, state.rank(), step, before, one);
    }
  });
}

}  // namespace
}  // namespace lockstep
