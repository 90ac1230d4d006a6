// Requests to a store behind a secret, as they come from a connection. They are read, answered, and
// read again without what follows and cut off.

#include <string>
#include <string_view>

#include "lockstep/parallel_state/key_values.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using Outcome = StoreRequest::Outcome;
  KeyValues values;
  std::string answers;
  StoreRequest request, part;
  for (std::string_view left = fuzz::text_of(data, size); !left.empty();) {
    if (request.read(left) != Outcome::whole) break;
    fuzz::check(request.size > 0 && request.size <= left.size(), "size");
    fuzz::check(part.read(left.substr(0, request.size)) == Outcome::whole, "without what follows");
    fuzz::check(part.read(left.substr(0, request.size - 1)) == Outcome::incomplete, "cut off");
    if (!values.answer(request, answers)) break;
    left.remove_prefix(request.size);
  }
  return 0;
}
