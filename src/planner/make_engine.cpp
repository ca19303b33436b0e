#include "ballast/planner/make_engine.h"

#include "ballast/calibrate/kept_choices.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/planner/draw_blueprint.h"

namespace ballast::planner {

engine::EngineOptions engine_options(const config::Config& config, const comm::Launch& launch) {
  const config::OptimizerSection& optimizer = config.optimizer;
  return {.device = std::string(config::name_of(config.ballast.device)),
          .device_numbers = config.ballast.devices,
          .compute_threads = config.ballast.compute_threads,
          .link_gbps = config.ballast.link_gbps,
          .kernels = calibrate::kernel_options(config, launch.world == launch.local_world),
          .update = inputs::updater_options(config),
          .hyper = {.beta1 = optimizer.beta1,
                    .beta2 = optimizer.beta2,
                    .epsilon = optimizer.eps,
                    .momentum = optimizer.momentum,
                    .nesterov = optimizer.nesterov,
                    .weight_decay = optimizer.weight_decay},
          .preference = config.ballast.preference,
          .gradient_clipping = config.gradient_clipping,
          .router_bias_update_speed = config.router_bias_update_speed,
          .seed = config.ballast.seed,
          .swap = inputs::swap_options(config, launch),
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

}  // namespace ballast::planner
