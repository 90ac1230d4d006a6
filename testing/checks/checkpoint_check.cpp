#include "lockstep/testing/checkpoint_check.h"

#include <stdlib.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/core/check.h"
#include "lockstep/core/exception_text.h"
#include "lockstep/testing/rank_threads.h"
#include "lockstep/testing/trained_rank.h"

namespace lockstep::testing {
namespace {

/// A folder that is removed at the end.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "lockstep_check_XXXXXX";
    require<FileError>(::mkdtemp(pattern.data()) != nullptr,
                       "{}: a temporary folder cannot be created", pattern);
    path_ = pattern;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Where two tensors differ; NaN equals NaN.
at::Tensor differences(const at::Tensor& a, const at::Tensor& b) {
  return a.ne(b).logical_and(a.isnan().logical_and(b.isnan()).logical_not());
}

/// A whole tensor, assembled from the parts that ranks hold: all [numel].
struct WholeTensor {
  at::Tensor values;    ///< fp64
  at::Tensor held;      ///< whether a rank holds the element
  at::Tensor disputed;  ///< whether ranks hold different values of it
};

/// Whole tensors by name and state.
class WholeState {
 public:
  void add(const std::vector<StateTensor>& tensors) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const StateTensor& tensor : tensors) add(tensor);
  }

  const std::map<std::pair<std::string, std::string>, WholeTensor>& tensors() const {
    return tensors_;
  }

 private:
  void add(const StateTensor& tensor) {
    const TensorBox box = whole_box(tensor.part.box.shape);
    WholeTensor& whole = tensors_[{tensor.name, tensor.state}];
    if (!whole.values.defined())
      whole = {.values = at::zeros({box.numel()}, at::kDouble),
               .held = at::zeros({box.numel()}, at::kBool),
               .disputed = at::zeros({box.numel()}, at::kBool)};
    const at::Tensor part = tensor.values.detach().to(at::kDouble).flatten();
    for_each_overlap({box, {0, box.numel()}}, tensor.part,
                     [&](int64_t to, int64_t from, int64_t count) {
                       const int64_t first = from - tensor.part.range.first;
                       const at::Tensor own = part.slice(0, first, first + count);
                       const at::Tensor values = whole.values.slice(0, to, to + count);
                       const at::Tensor held = whole.held.slice(0, to, to + count);
                       whole.disputed.slice(0, to, to + count)
                           .logical_or_(held.logical_and(differences(values, own)));
                       values.copy_(own);
                       held.fill_(true);
                     });
  }

  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, WholeTensor> tensors_;
};

/// "3 of 64 elements, the first at 5"; empty: none of `elements`.
std::string elements_text(const at::Tensor& elements) {
  const int64_t count = elements.sum().item<int64_t>();
  if (count == 0) return "";
  return fmt::format("{} of {} elements, the first at {}", count, elements.numel(),
                     elements.to(at::kByte).argmax().item<int64_t>());
}

/// Why the ranks hold no whole tensor; empty: they do.
std::string fault_of(const WholeTensor& whole, const char* where) {
  const std::string disputed = elements_text(whole.disputed);
  if (!disputed.empty())
    return fmt::format("{}, ranks hold different values of {}", where, disputed);
  const std::string missing = elements_text(whole.held.logical_not());
  return missing.empty() ? "" : fmt::format("{}, no rank holds {}", where, missing);
}

std::string difference(const at::Tensor& saved, const at::Tensor& loaded) {
  if (saved.numel() != loaded.numel())
    return fmt::format("{} elements were saved, {} are there", saved.numel(), loaded.numel());
  const at::Tensor differs = differences(saved, loaded);
  const int64_t count = differs.sum().item<int64_t>();
  if (count == 0) return "";
  const int64_t first = differs.to(at::kByte).argmax().item<int64_t>();
  return fmt::format(
      "{} of {} elements differ, the first at {}: {:.17g} was saved, {:.17g} is there", count,
      saved.numel(), first, saved[first].item<double>(), loaded[first].item<double>());
}

/// What is wrong with a tensor that was saved; empty: nothing. `loaded` is null if nothing has its
/// name.
std::string change_of(const WholeTensor& saved, const WholeTensor* loaded) {
  if (const std::string fault = fault_of(saved, "where it was saved"); !fault.empty()) return fault;
  if (loaded == nullptr) return "was saved, and nothing of the loaded model has this name";
  if (const std::string fault = fault_of(*loaded, "after loading"); !fault.empty()) return fault;
  return difference(saved.values, loaded->values);
}

std::vector<ChangedTensor> changes(const WholeState& saved, const WholeState& loaded) {
  std::vector<ChangedTensor> changed;
  for (const auto& [key, whole] : saved.tensors()) {
    const auto found = loaded.tensors().find(key);
    const std::string what =
        change_of(whole, found == loaded.tensors().end() ? nullptr : &found->second);
    if (!what.empty()) changed.push_back({key.first, key.second, what});
  }
  for (const auto& [key, whole] : loaded.tensors())
    if (!saved.tensors().contains(key))
      changed.push_back({key.first, key.second, "is there, and was not saved"});
  return changed;
}

}  // namespace

bool CheckpointReport::ok() const {
  return changed.empty() && error.empty() && next_loss == next_loss &&
         std::abs(next_loss - loaded_loss) <= tolerance * std::max(1.0, std::abs(next_loss));
}

std::string to_string(const CheckpointReport& report) {
  std::string text;
  const std::string where = fmt::format("saved on {}, loaded on {}: ", to_string(report.saved_on),
                                        to_string(report.loaded_on));
  if (!report.error.empty()) text += where + report.error + "\n";
  for (const ChangedTensor& tensor : report.changed)
    text += fmt::format("{}`{}`{}: {}\n", where, tensor.name,
                        tensor.state.empty() ? "" : ", " + tensor.state, tensor.what);
  if (text.empty() && !report.ok())
    text = fmt::format(
        "{}all tensors are equal, and the loss of the next step is {:.17g} instead "
        "of {:.17g}: the model keeps something else that changes in training\n",
        where, report.loaded_loss, report.next_loss);
  return text.empty() ? where + "equal\n" : text;
}

CheckpointReport check_checkpoint(const MakeModule& make_model, const StageLoss& loss,
                                  const RankLayout& saved_on, const RankLayout& loaded_on,
                                  const CheckOptions& options) {
  for (const RankLayout* layout : {&saved_on, &loaded_on}) layout->grids();
  CheckpointReport report = {
      .saved_on = saved_on, .loaded_on = loaded_on, .tolerance = options.tolerance};
  const ScratchFolder folder;
  WholeState saved, loaded;
  const auto threads = [&](const RankLayout& layout) {
    RankThreadOptions result;
    result.sizes = layout.sizes;
    result.timeout = options.timeout;
    return result;
  };
  try {
    const WholeWeights first = weights_in_one_process(make_model, options.seed);
    run_ranks(
        saved_on.ranks,
        [&](const ParallelState& state) {
          TrainedRank rank(make_model, loss, saved_on, options, state, first);
          for (int64_t step = 0; step < options.steps; ++step) rank.step(step);
          const std::vector<StateTensor> tensors = rank.state_tensors();
          saved.add(tensors);
          CheckpointSaver saver(state, {.folder = folder.path()});
          saver.save(tensors,
                     {.iteration = options.steps, .optimizer = rank.optimizer().progress()},
                     Config{});
          const double next = rank.step(options.steps);
          if (state.rank() == 0) report.next_loss = next;
        },
        threads(saved_on));
    const WholeWeights others = weights_in_one_process(make_model, options.seed + 1);
    run_ranks(
        loaded_on.ranks,
        [&](const ParallelState& state) {
          TrainedRank rank(make_model, loss, loaded_on, options, state, others);
          CheckpointReader checkpoint(folder.path());
          const std::vector<StateTensor> tensors = rank.state_tensors();
          check_no_weight_left(checkpoint, model_state(rank.module(), state), state);
          load_state(checkpoint, tensors);
          rank.optimizer().restore({.num_steps = checkpoint.manifest().optimizer_steps});
          rank.optimizer().apply_master_weights();
          loaded.add(tensors);
          const double next = rank.step(options.steps);
          if (state.rank() == 0) report.loaded_loss = next;
        },
        threads(loaded_on));
  } catch (...) {
    report.error = text_of_exception();
    return report;
  }
  report.changed = changes(saved, loaded);
  return report;
}

}  // namespace lockstep::testing
