#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lockstep/parallel_state/order_proof.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Runs `body` for every rank of the world, one after the other, as planning ranks
/// (ParallelState::planning_rank), and compares what they communicate: in each group all members
/// must make the same collectives in the same order (operation, label, number of elements, dtype),
/// and between two ranks everything that is sent must be received, in the same order. If that
/// holds, verify() looks for ranks that wait for each other across groups. Returns the first
/// difference, with group, ranks, operation and label, or the cycle of ranks that wait, or nothing.
/// What `body` throws is rethrown as an Error that names the rank.
///
/// A message of at most 1 KiB of host memory from a lower rank arrives as it was sent; every other
/// message is zeros. So a PipelineExecutor learns the shapes of its inputs from lower ranks. With
/// several chunks higher ranks send inputs too, and it needs `activation_shape`. If ranks gather
/// texts of different lengths (all_gather_texts()), `body` may run for all ranks a second time; it
/// must do the same then.
std::optional<std::string> verify_collectives(
    const ParallelSizes& sizes, const std::function<void(const ParallelState&)>& body);

/// Proves that all ranks of `world` finish `program`, or finds out why not: see prove_order(). Each
/// rank runs it as a planning rank with tensors on the CPU, and waits where it calls Work::wait().
/// What ranks receive, and which run twice, is as for verify_collectives(). For your own loop:
///
///     const OrderVerdict verdict = verify([](const ParallelState& state) { train_step(state); },
///                                         {.world_size = 8, .tensor = 2});
///     if (!verdict.ok()) std::cerr << verdict.to_string();
///
/// With `class_of` only one rank of each class runs and represents the others: ranks with equal
/// class numbers must do the same, each in its own groups. An Error names the rank that throws.
OrderVerdict verify(const std::function<void(const ParallelState&)>& program,
                    const ParallelSizes& world,
                    const std::function<int64_t(int64_t rank)>& class_of = {});

}  // namespace lockstep
