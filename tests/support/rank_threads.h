#pragma once

// Of lockstep::testing.
#include "lockstep/testing/rank_threads.h"
