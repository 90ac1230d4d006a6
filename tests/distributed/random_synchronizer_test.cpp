// 400 random lists of parameters on random meshes, for GradientSynchronizer and clip_grad_norm_:
// uneven and empty parts, several meshes, pipeline stages, small buckets.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/tests/distributed/drawn_mesh.h"

namespace lockstep {
namespace {

using testing::AxisRole;
using testing::Draw;
using testing::DrawnMesh;
using testing::DrawnParam;
using testing::gradient_tolerance;
using testing::GridPlace;
using testing::RandomCase;
using testing::Usage;

/// Where a parameter lives.
enum class Home {
  mesh,   ///< the mesh of all ranks
  other,  ///< another mesh of all ranks
  stage,  ///< one stage of the pipeline, which is the first axis of the mesh
  plain,  ///< no mesh: each rank has its own
};

struct ListedParam {
  DrawnParam drawn;
  Home home = Home::mesh;
  int64_t stage = 0;
  size_t group = 0;  ///< index of the optimizer's parameter group
  bool wide_grad = false;
  bool strided = false;  ///< replaces the gradient of backward by a strided one
};

/// A random case.
struct DrawnList {
  DrawnList(uint32_t seed, int64_t world) : draw(seed) {
    pipeline = world > 1 && draw.one_in(3);
    do mesh = testing::draw_mesh(draw, world, {"dp", "tp", "cp"});
    while (pipeline && mesh.sizes.size() == 1);
    if (pipeline) mesh.names[0] = "pp";
    other = testing::draw_mesh(draw, world, {"ep", "edp"});
    allow_unused = draw.one_in(2);
    reduction = draw.of<GradientReduction>(
        {GradientReduction::sum, GradientReduction::mean, GradientReduction::per_token});
    bucket_bytes = draw.of<int64_t>({8, 24, 60, 200, 1000, 1 << 20});
    microbatches = {draw.between(1, 3), draw.between(1, 3)};
    norm_type = draw.of<double>({2, 2, 2, 1, 3, std::numeric_limits<double>::infinity()});
    const int64_t count = draw.between(1, 9);
    add_anchor();
    for (int64_t i = 0; i < count; ++i) add_param();
  }

  const DrawnMesh& mesh_of(const ListedParam& param) const {
    return param.home == Home::other ? other : mesh;
  }
  bool is_here(const ListedParam& param, int64_t rank) const {
    return param.home != Home::stage || mesh.place(rank).coordinates[0] == param.stage;
  }
  /// The ranks whose terms make up the gradient of `rank`.
  RankList summed_ranks(const ListedParam& param, int64_t rank) const {
    return mesh_of(param).ranks_along(
        rank, [&](size_t axis) { return param.drawn.axes[axis].role == AxisRole::sum; });
  }
  int64_t tokens(int64_t rank) const { return (rank * 3 + microbatches[0]) % 5; }
  int64_t divisor(const ListedParam& param, int64_t rank) const {
    if (reduction == GradientReduction::sum) return 1;
    if (reduction == GradientReduction::mean)
      return static_cast<int64_t>(summed_ranks(param, rank).size());
    int64_t sum = 0;
    for (const int64_t member : mesh.ranks_along(rank, [](size_t) { return true; }))
      sum += tokens(member);
    return std::max<int64_t>(sum, 1);
  }
  at::Tensor gradient(const ListedParam& param, const GridPlace& place, int64_t rank,
                      int64_t step) const {
    if (!param.drawn.trained) return at::zeros(local_shape(param.drawn, place), at::kDouble);
    return reduced_gradient(param.drawn, place, 0, step, microbatches[static_cast<size_t>(step)]) /
           divisor(param, rank);
  }

  std::string text() const {
    std::string result = fmt::format(
        "  {}, other {}, reduction {}, buckets of {} bytes, micro-batches {} and {}, unused {}, "
        "norm {}\n",
        mesh.text(), other.text(), to_string(reduction), bucket_bytes, microbatches[0],
        microbatches[1], allow_unused, norm_type);
    for (const ListedParam& param : params)
      result += fmt::format("  {}{}{}{}{}\n", param.drawn.text(),
                            param.home == Home::stage   ? fmt::format(" stage {}", param.stage)
                            : param.home == Home::other ? " other mesh"
                            : param.home == Home::plain ? " plain"
                                                        : "",
                            param.group == 1 ? " group 1" : "", param.wide_grad ? " wide" : "",
                            param.strided ? " strided" : "");
    return result;
  }

  Draw draw;
  DrawnMesh mesh, other;
  bool pipeline, allow_unused;
  GradientReduction reduction;
  int64_t bucket_bytes;
  std::vector<int64_t> microbatches;  ///< of each of the two steps
  double norm_type;
  std::vector<ListedParam> params;

 private:
  void add_anchor() {
    DrawnParam drawn{.number = 0, .shape = {3}};
    drawn.axes.assign(mesh.sizes.size(), {AxisRole::sum});
    params.push_back({drawn});
  }

  void add_param() {
    ListedParam param;
    const std::vector<Usage> usages =
        allow_unused ? std::vector{Usage::always, Usage::now_and_then} : std::vector{Usage::always};
    param.drawn = draw_param(draw, static_cast<int64_t>(params.size()), usages);
    param.drawn.trained = !draw.one_in(10);
    param.group = static_cast<size_t>(draw.below(2));
    param.wide_grad = param.drawn.dtype == at::kBFloat16;
    param.home = pipeline ? draw.of<Home>({Home::mesh, Home::stage, Home::stage, Home::plain})
                          : draw.of<Home>({Home::mesh, Home::mesh, Home::other, Home::plain});
    param.stage = draw.below(mesh.sizes[0]);
    param.strided = param.home == Home::plain && draw.one_in(2);
    draw_axes(param);
    params.push_back(std::move(param));
  }

  void draw_axes(ListedParam& param) {
    const auto dims = static_cast<int64_t>(param.drawn.shape.size());
    for (size_t axis = 0; axis < mesh_of(param).sizes.size(); ++axis) {
      const bool stages = pipeline && axis == 0;
      testing::AxisShare share{draw.of<AxisRole>(
          {AxisRole::same, AxisRole::cut, AxisRole::cut, AxisRole::sum, AxisRole::sum})};
      if (share.role == AxisRole::cut && (dims == 0 || stages)) share.role = AxisRole::sum;
      if (share.role == AxisRole::cut) share.dim = draw.below(dims);
      if (stages && param.home == Home::stage) share.role = AxisRole::own;
      if (param.home == Home::plain) share.role = AxisRole::own;
      param.drawn.axes.push_back(share);
    }
  }
};

/// One rank's part of a case.
class SynchronizedList {
 public:
  SynchronizedList(const DrawnList& list, const ParallelState& state, RandomCase& one)
      : list_(list),
        rank_(state.rank()),
        one_(one),
        mesh_(state, list.mesh.sizes, list.mesh.names),
        other_(state, list.other.sizes, list.other.names) {
    for (const ListedParam& param : list_.params)
      if (list_.is_here(param, rank_)) add(param);
    GradientSynchronizerOptions options;
    options.reduction = list.reduction;
    options.allow_unused_parameters = list.allow_unused;
    if (list.reduction == GradientReduction::per_token) options.token_group = mesh_.get_group();
    sync_.emplace(std::vector<MeshParameters>{groups_[0], groups_[1]},
                  static_cast<double>(list.bucket_bytes) / (1 << 20), list.microbatches[0],
                  options);
    sync_->bind();
  }

  void step(int64_t step) {
    const int64_t microbatches = list_.microbatches[static_cast<size_t>(step)];
    sync_->set_required_accumulations(microbatches);
    const size_t calls_before = one_.calls.size();
    for (int64_t m = 0; m < microbatches; ++m) run_backward({step, m, microbatches});
    if (list_.reduction == GradientReduction::per_token)
      sync_->wait(at::full({}, list_.tokens(rank_)));
    else
      sync_->wait();
    check_gradients(step, 1);
    check_bytes(calls_before);
    check_norm(step);
    sync_->zero_grad();
  }

 private:
  struct Listed {
    const ListedParam* param;
    MeshParameter parameter;
    GridPlace place;
  };

  void add(const ListedParam& param) {
    const GridPlace place = list_.mesh_of(param).place(rank_);
    const at::Tensor leaf = testing::leaf_of(param.drawn, place);
    if (param.wide_grad) leaf.set_grad_dtype(at::kFloat);
    listed_.push_back({&param, parameter_of(param, leaf), place});
    groups_[param.group].push_back(listed_.back().parameter);
  }

  MeshParameter parameter_of(const ListedParam& param, const at::Tensor& leaf) const {
    if (param.home == Home::plain) return {leaf, param.drawn.name()};
    std::vector<Placement> placements = placements_of(param.drawn);
    std::vector<std::string> complete;
    const DrawnMesh& drawn_mesh = list_.mesh_of(param);
    for (size_t axis = 0; axis < drawn_mesh.sizes.size(); ++axis)
      if (param.drawn.axes[axis].role == AxisRole::same) complete.push_back(drawn_mesh.names[axis]);
    DeviceMesh mesh = param.home == Home::other ? other_ : mesh_;
    if (param.home == Home::stage) {
      mesh = mesh_.slice({list_.mesh.names.begin() + 1, list_.mesh.names.end()});
      placements.erase(placements.begin());
    }
    return {DTensor::from_local(leaf, mesh, placements, param.drawn.shape), param.drawn.name(),
            complete};
  }

  void run_backward(const testing::Moment& moment) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const Listed& listed : listed_) {
      if (!listed.param->drawn.trained) continue;
      const at::Tensor term =
          loss_of(listed.param->drawn, listed.parameter.tensor, listed.place, 0, moment);
      if (term.defined()) loss = loss + term;
    }
    loss.backward();
  }

  double tolerance(const ListedParam& param) const {
    return gradient_tolerance(param.drawn.dtype, list_.divisor(param, rank_));
  }

  /// `factor`: the factor of clipping. If it is not `exact`, it has rounding errors.
  void check_gradients(int64_t step, double factor, bool exact = true) {
    for (const Listed& listed : listed_) {
      if (!listed.param->drawn.trained) continue;
      const at::Tensor wanted = list_.gradient(*listed.param, listed.place, rank_, step) * factor;
      const at::Tensor found = listed.parameter.tensor.grad();
      const bool none = !found.defined() && wanted.eq(0).all().item<bool>();
      if (none && list_.allow_unused) continue;
      const double clipped = exact && listed.param->drawn.dtype == at::kDouble ? 1e-12 : 1e-4;
      one_.compare(found, wanted, factor == 1 ? tolerance(*listed.param) : clipped,
                   fmt::format("gradient of {} in step {}, clipped by {}",
                               listed.param->drawn.name(), step, factor));
    }
  }

  /// Each bucket is sent once to the ranks that hold terms of it, and nothing else is sent.
  void check_bytes(size_t calls_before) {
    std::map<RankList, int64_t> wanted, sent;
    for (const Listed& listed : listed_) {
      const RankList ranks = list_.summed_ranks(*listed.param, rank_);
      const at::Tensor& tensor = listed.parameter.tensor;
      if (ranks.size() > 1 && listed.param->drawn.trained && tensor.numel() > 0)
        wanted[ranks] +=
            tensor.numel() *
            (listed.param->wide_grad ? 4 : static_cast<int64_t>(tensor.element_size()));
    }
    for (size_t i = calls_before; i < one_.calls.size(); ++i)
      if (one_.calls[i].label.starts_with("bucket") && one_.calls[i].bytes > 0)
        sent[one_.calls[i].ranks] += one_.calls[i].bytes;
    one_.require(sent == wanted, fmt::format("{} was sent instead of {}", sent, wanted));
  }

  /// The contribution of `param` to the norm on this rank: all parts if it lies on a mesh, this
  /// rank's own gradient if it is plain. For pipeline stages, each stage's own gradients.
  double norm_part(const ListedParam& param, int64_t step) const {
    if (!param.drawn.trained) return 0;
    double part = 0;
    const auto add_rank = [&](int64_t rank) {
      const DrawnMesh& mesh = list_.mesh_of(param);
      visit_parts(param.drawn, mesh.place(rank), [&](const GridPlace& place) {
        const at::Tensor size = list_.gradient(param, place, rank, step).abs();
        if (size.numel() == 0) return;
        if (std::isinf(list_.norm_type))
          part = std::max(part, size.max().item<double>());
        else
          part += size.pow(list_.norm_type).sum().item<double>();
      });
    };
    const RankList stages = list_.mesh.ranks_along(rank_, [&](size_t axis) { return axis == 0; });
    if (param.home == Home::stage)
      add_rank(stages[static_cast<size_t>(param.stage)]);
    else if (param.home == Home::plain && list_.pipeline)
      for (const int64_t rank : stages) add_rank(rank);
    else
      add_rank(rank_);
    return part;
  }

  void check_norm(int64_t step) {
    double wanted = 0;
    bool exact = true;
    for (const ListedParam& param : list_.params) {
      const double part = norm_part(param, step);
      wanted = std::isinf(list_.norm_type) ? std::max(wanted, part) : wanted + part;
      exact = exact && tolerance(param) <= 1e-12;
    }
    if (!std::isinf(list_.norm_type)) wanted = std::pow(wanted, 1 / list_.norm_type);
    std::vector<MeshParameter> all;
    for (const Listed& listed : listed_) {
      const at::Tensor gradient = listed.parameter.tensor.grad();
      if (listed.param->strided && gradient.defined())
        listed.parameter.tensor.mutable_grad() = at::stack({gradient, gradient}, -1).select(-1, 0);
      all.push_back(listed.parameter);
    }
    const double max_norm = 5;
    const double found = clip_grad_norm_(MeshParameters(all), max_norm, list_.norm_type, false, {},
                                         list_.pipeline ? std::optional(mesh_["pp"]) : std::nullopt)
                             .item<double>();
    one_.compare(found, wanted, exact ? 1e-12 : 1e-5, fmt::format("norm of step {}", step));
    check_gradients(step, std::min(1., max_norm / (wanted + 1e-6)), exact);
  }

  const DrawnList& list_;
  int64_t rank_;
  RandomCase& one_;
  DeviceMesh mesh_, other_;
  std::vector<Listed> listed_;
  std::vector<MeshParameter> groups_[2];
  std::optional<GradientSynchronizer> sync_;
};

TEST(RandomGradientSynchronizer, GradientsNormAndCommunicationOfFourHundredLists) {
  std::vector<ParallelSizes> worlds;
  for (const int64_t ranks : {1, 2, 3, 4, 4, 5, 6, 6, 8}) {
    worlds.emplace_back();
    worlds.back().world_size = ranks;
  }
  testing::run_random_cases(400, worlds, [](const ParallelState& state, RandomCase& one) {
    const DrawnList list(one.seed, state.world_size());
    one.text = list.text();
    SynchronizedList synchronized(list, state, one);
    for (int64_t step = 0; step < 2; ++step) synchronized.step(step);
  });
}

}  // namespace
}  // namespace lockstep
