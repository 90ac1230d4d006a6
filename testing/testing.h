#pragma once

/// lockstep::testing in one include.

#include "lockstep/testing/checkpoint_check.h"
#include "lockstep/testing/collective_log.h"
#include "lockstep/testing/gradient_check.h"
#include "lockstep/testing/layout_check.h"
#include "lockstep/testing/model_check.h"
#include "lockstep/testing/rank_layout.h"
#include "lockstep/testing/rank_threads.h"
#include "lockstep/testing/step_communication.h"
