#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>

namespace lockstep::testing {

/// Whether `call` throws ErrorType with a message that contains `part`:
/// EXPECT_TRUE(throws_with<ConfigError>([&] { validate(config); }, "model.num_layers"));
template <class ErrorType, class Call>
::testing::AssertionResult throws_with(Call call, const std::string& part) {
  try {
    call();
  } catch (const ErrorType& error) {
    if (std::string(error.what()).find(part) != std::string::npos)
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "no '" << part << "' in: " << error.what();
  } catch (const std::exception& error) {
    return ::testing::AssertionFailure() << "another kind of error: " << error.what();
  }
  return ::testing::AssertionFailure() << "nothing was thrown; expected '" << part << "'";
}

}  // namespace lockstep::testing
