#pragma once

// Of lockstep::testing.
#include "lockstep/testing/recording_backend.h"
