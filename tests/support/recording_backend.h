#pragma once

// Belongs to lockstep::testing.
#include "lockstep/testing/recording_backend.h"
