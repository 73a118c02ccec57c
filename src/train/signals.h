// Requests to stop. SIGUSR1, and SIGTERM that reaches the rank itself, set a flag; the trainer agrees on it with all
// ranks at the end of the step, saves a checkpoint and exits with 75. Not collective.
#pragma once

namespace annulus::train {

void install_stop_signals();
int stop_signal();  // the signal's number, 0 if none came

}  // namespace annulus::train
