// The threads that PyTorch itself computes with. They wait for work by spinning for a while, so
// another set of threads would have to share the processor with them.
#pragma once

namespace daf {

using TeamFunction = void (*)(void* data);

// Calls `function` on up to `threads` of PyTorch's threads, the caller being one of them, and
// returns once all are through; false, with nothing done, where there are not so many.
bool run_on_team(TeamFunction function, void* data, int threads);

// How many threads PyTorch's team has for this caller; 0 where it cannot be joined.
int team_threads();

}  // namespace daf
