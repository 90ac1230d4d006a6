#pragma once

// Internal.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

class DistributedDataParallel;
class ParallelState;

/// UsageError naming the parameter if it is to be trained, but is not a leaf of the graph, is not
/// of a floating-point type, is sparse, or has elements that share memory.
void refuse_untrainable(const std::string& name, const at::Tensor& tensor);

/// UsageError naming `front`: a tensor that is undefined, a tensor or a name that is listed twice,
/// a trained parameter that a front has taken over already or that refuse_untrainable() refuses.
void check_parameter_list(const std::vector<NamedParameter>& parameters, const char* front);

/// UsageError naming two parameters, or a parameter and one of the registered `buffers`, that share
/// elements in memory, if a parameter of them is trained: for a front that gives each parameter
/// memory of its own. One tensor may be both. After check_parameter_list().
void refuse_shared_memory(const std::vector<NamedParameter>& parameters,
                          const std::vector<NamedParameter>& buffers, const char* front);

/// UsageError naming a trained parameter that is not on the device of a job of several ranks. After
/// check_parameter_list().
void refuse_other_devices(const std::vector<NamedParameter>& parameters, const ParallelState& state,
                          const char* front);

/// UsageError naming the first of `frozen`, which were frozen when a front took the model over,
/// that requires a gradient now.
void refuse_unfrozen(const std::vector<NamedParameter>& frozen);

/// UsageError naming the first parameter of `buffer` that requires no gradient now. Its place in
/// the buffer would count as a gradient of zeros, with which an optimizer still changes it.
void refuse_frozen(const ParamAndGradBuffer& buffer);

/// Compares the parameters of all ranks of `group`: names, order, shapes, dtypes, types of device,
/// descriptions and whether they require a gradient; `settings`; and of registered `buffers` names,
/// order, shapes, dtypes and types of device. Every rank throws the same CommunicationError, with
/// the first difference, if there is one. Sends 8 bytes per rank as long as all agree. `cut_over`:
/// axes of which the group may have several ranks; the dimensions that these cut are left out of
/// the shapes of parameters.
///
/// `own_checks` checks the arguments of this rank first. If it throws, this rank rethrows the
/// exception, and the ranks whose own arguments are valid throw CommunicationError with rank and
/// message: nobody waits for a rank that has refused its list. The same holds for a description
/// that contradicts itself (ParamDescription::validate), cuts a dimension that the tensor does not
/// have, or asks for a matrix update of a vector.
void check_same_parameters(const std::vector<NamedParameter>& parameters, const ProcessGroup& group,
                           const std::vector<ConfigValue>& settings = {},
                           const std::function<void()>& own_checks = {},
                           const std::vector<MeshAxis>& cut_over = {},
                           const std::vector<NamedParameter>& buffers = {});

/// Every rank throws CommunicationError if `text` is not the same on all ranks: "the ranks of group
/// dp [0, 1] have different communication hooks: none on rank 0 and ... on rank 1". Sends 8 bytes
/// per rank while all agree.
void check_same_text(const std::string& text, const ProcessGroup& group, const char* what);

/// "trained", "frozen"
std::string trained_text(const NamedParameter& param);
/// "trained", "frozen, no weight decay"
std::string settings_text(const NamedParameter& param);

struct NamedText {
  std::string name, text;
};
/// Every rank throws CommunicationError if ranks of `group` give different texts for one name. Each
/// may have names that others lack. Sends 8 bytes per rank if all lists are the same.
void check_same_by_name(const std::vector<NamedText>& facts, const ProcessGroup& group);

/// Whether all ranks of `group` give the same number. Sends 8 bytes per rank.
bool is_same_on_all_ranks(uint64_t number, const ProcessGroup& group, const std::string& label);

/// Whether elements of `tensor` may share memory, as those of an expanded tensor do. A write to one
/// of them would change another.
bool may_overlap(const at::Tensor& tensor);

/// A view of `tensor` in which each place in memory occurs only once, for a tensor that was
/// expanded.
at::Tensor without_repetition(at::Tensor tensor);

/// UsageError naming `caller`: no model, a null pointer, a model that is listed twice.
void check_model_list(const std::vector<DistributedDataParallel*>& models, const char* caller);

/// UsageError naming the first parameter that is no longer a view of `buffer`. No gather of the
/// buffer may be in progress.
void check_params_attached(const ParamAndGradBuffer& buffer);

}  // namespace lockstep
