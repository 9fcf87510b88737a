// PyTorch's own compute threads. They spin while waiting, so another set would compete with them.
#pragma once

namespace daf {

using TeamFunction = void (*)(void* data);

// Calls `function` on up to `threads` of PyTorch's threads, the caller included, and returns once
// all are done; false, with nothing done, if there are too few.
bool run_on_team(TeamFunction function, void* data, int threads);

// Threads of PyTorch's team for this caller; 0 if it cannot be joined.
int team_threads();

}  // namespace daf
