#pragma once

// Belongs to lockstep::testing.
#include "lockstep/testing/rank_threads.h"
