// Runs work in a forked process, which may be killed, limited, or leave HDF5 in whatever state.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <string>

namespace annulus::checkpoint::testing {

struct ChildEnd {
  int signal = 0;    // that killed it
  std::string text;  // what the work returned, or the exception it died of
};

template <class Work>  // std::string()
ChildEnd run_in_child(const Work& work) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return {0, "no pipe"};
  const pid_t child = fork();
  if (child == 0) {
    std::string text;
    try {
      text = work();
    } catch (const std::exception& e) {
      text = std::string("exception: ") + e.what();
    }
    const ssize_t written = write(pipe_ends[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(pipe_ends[1]);
  ChildEnd end;
  char block[4096];
  for (ssize_t n; (n = read(pipe_ends[0], block, sizeof block)) > 0;)
    end.text.append(block, static_cast<std::size_t>(n));
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

}  // namespace annulus::checkpoint::testing
