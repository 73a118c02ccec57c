#include "commands.h"
#include "train/trainer.h"

namespace annulus::tools {

int run_train(const TrainCommand& command, parallel::MpiRuntime& runtime) {
  return train::run_training(train::load_config(command.config, command.overrides), runtime);
}

}  // namespace annulus::tools
