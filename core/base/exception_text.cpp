#include "lockstep/core/exception_text.h"

#include <exception>

#include <c10/util/Exception.h>

namespace lockstep {

std::string text_of_exception() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (const char* text) {
    return text ? text : "";
  } catch (const std::string& text) {
    return text;
  } catch (...) {
    return "an exception of an unknown type";
  }
}

}  // namespace lockstep
