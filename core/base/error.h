#pragma once

#include <stdexcept>

namespace lockstep {

/// Base of every error that Lockstep raises itself. Errors of libtorch (c10::Error) pass through
/// unless a call says that it translates them. Each message names the object (parameter, field,
/// group, rank or file), what was found and what is allowed.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument, option, environment variable or configuration field that cannot be used. Raised
/// before any work starts; the `lockstep` program exits with status 2.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A call that is not allowed in the present state of its object, or data that violate the contract
/// of the call (a missing gradient, a tensor of another shape).
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A communication that failed or timed out, or ranks that disagree. Names group, operation and
/// label. The group cannot be used afterwards.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// A file that is missing, unreadable or damaged. Names the path and the place.
class FileError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep
