#include "ballast/planning/make_engine.h"

#include "ballast/planning/draw_blueprint.h"
#include "ballast/planning/engine_inputs.h"
#include "ballast/planning/kept_choices.h"

namespace ballast::planning {

engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch) {
  const config::OptimizerSection& optimizer = config.optimizer;
  return {.device = config.ballast.device,
          .compute_threads = config.ballast.compute_threads,
          .link_gbps = config.ballast.link_gbps,
          .kernels = kernel_options(config),
          .update = updater_options(config),
          .hyper = {.beta1 = optimizer.beta1,
                    .beta2 = optimizer.beta2,
                    .epsilon = optimizer.eps,
                    .momentum = optimizer.momentum,
                    .nesterov = optimizer.nesterov,
                    .weight_decay = optimizer.weight_decay},
          .preference = config.ballast.preference,
          .gradient_clipping = config.gradient_clipping,
          .seed = config.ballast.seed,
          .swap = swap_options(config, launch),
          .serial = config.ballast.serial,
          .nvtx = config.ballast.nvtx,
          .delay_seed = config.ballast.delay_seed};
}

engine::Engine make_engine(const config::Config& config, const std::atomic<bool>* interrupted,
                           comm::Ranks* ranks) {
  const comm::Launch launch = ranks == nullptr ? comm::Launch{} : ranks->launch();
  return engine::Engine(draw_blueprint(config, ranks), engine_options(config, launch), interrupted,
                        ranks);
}

}  // namespace ballast::planning
