#pragma once

/// The public API in one include: everything for your own training loop or model. Separate headers:
/// data sets, the planner, core/config_io.h, parallel_state/planning.h, models/moe_layer.h,
/// models/recompute.h, models/context_parallel.h, optimizer/orthogonalize.h,
/// checkpoint/checkpoint_folder.h, checkpoint/hugging_face.h, testing/testing.h.

// Who the ranks are, and how they communicate.
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/device_mesh.h"
#include "lockstep/parallel_state/dtensor.h"
#include "lockstep/parallel_state/parallel_functions.h"
#include "lockstep/parallel_state/parallel_state.h"

// Parameters with descriptions, and the layers and models built from them.
#include "lockstep/core/config.h"
#include "lockstep/core/error.h"
#include "lockstep/core/parameters.h"
#include "lockstep/core/placement.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/embedding.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/models/key_value_cache.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/parallel_context.h"
#include "lockstep/models/router_step.h"

// Gradients.
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/power_sgd_hook.h"
#include "lockstep/distributed/reducer.h"

// Norms, clipping, updates, schedules.
#include "lockstep/optimizer/audit.h"
#include "lockstep/optimizer/audit_comparison.h"
#include "lockstep/optimizer/audited_loop.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/optimizer/loss_scaler.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/optimizer/param_scheduler.h"
#include "lockstep/optimizer/unscale_grads.h"
#include "lockstep/optimizer/update_rule.h"

// Pipelines.
#include "lockstep/pipeline/executor.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/simulation.h"
#include "lockstep/pipeline/timeline_svg.h"

// Checkpoints.
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/checkpoint/replica_check.h"
#include "lockstep/checkpoint/training_state.h"
