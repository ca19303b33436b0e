#include <algorithm>
#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "src/config/key_table.h"

namespace ballast::config {
namespace {

using Path = std::filesystem::path;

constexpr RealRange kGigabytes = {.low = 0.0, .high = 1e6};

/// A folder without a trailing slash, so that equal folders compare equal.
Path folder(const Value& value) {
  Path found = value.path_text();
  return found.has_filename() ? found : found.parent_path();
}

void add_folder(const Value& value, std::vector<Path>& folders) {
  Path found = folder(value);
  if (std::find(folders.begin(), folders.end(), found) != folders.end()) {
    value.fail(fmt::format("{} is listed twice; remove one", found.string()));
  }
  folders.push_back(std::move(found));
}

/// A folder or an array of folders; null, "" and [] mean none.
Key folders(std::string name, std::vector<Path>& target) {
  Key key = {std::move(name),
             [&target](const Value& value) {
               target.clear();
               if (value.json() == "") return;
               if (value.json().is_string()) {
                 target.push_back(folder(value));
                 return;
               }
               for (const Value& item : value.elements("a path or an array of paths")) {
                 add_folder(item, target);
               }
             },
             [&target] {
               if (target.empty()) return Json();
               if (target.size() == 1) return Json(target.front().string());
               Json list = Json::array();
               for (const Path& path : target) list.push_back(path.string());
               return list;
             }};
  key.names_paths = true;
  return key;
}

constexpr std::array<std::string_view, 3> kOffloadDevices = {"none", "cpu", "nvme"};

struct OffloadTexts {
  KeyText device;
  KeyText nvme_path;
  KeyText buffer_count;
};
constexpr OffloadTexts kOptimizerTexts = {
    .device = {"where optimizer states live: `none` (device), `cpu` (host memory), `nvme`, `auto` "
               "(the planner decides block by block)",
               "`none`", ""},
    .nvme_path = {"swap folders. The folders of both sections are used together, in proportion to "
                  "their speed. One that is missing is made if its parent exists, and stays once a "
                  "step has used it",
                  "the run directory", "path or list of paths"},
    .buffer_count = {
        "host buffers for optimizer states in transit from and to NVMe; 0: chosen automatically",
        "0", "0 to 1024"}};
constexpr OffloadTexts kParameterTexts = {
    .device = {"where weights live: `none` (device), `cpu` (host memory), `nvme`, `auto` (the "
               "planner decides block by block)",
               "`none`", ""},
    .nvme_path = {"swap folders. The folders of both sections are used together, in proportion to "
                  "their speed",
                  "the run directory", "path or list of paths"},
    .buffer_count = {"host buffers for weights in transit; 0: chosen automatically", "0",
                     "0 to 1024"}};

Section offload_keys(OffloadSection& o, step::BufferCounts& buffers, const std::string& name,
                     const OffloadTexts& texts, std::vector<std::string>& log) {
  const auto read_device = [&o](const Value& value) {
    std::vector<std::string> choices(kOffloadDevices.begin(), kOffloadDevices.end());
    choices.emplace_back("auto");
    o.tier = std::nullopt;
    if (value.is_auto()) return;
    const std::string found = value.choice(choices);
    o.tier = kTiers[static_cast<std::size_t>(std::find(choices.begin(), choices.end(), found) -
                                             choices.begin())];
  };
  const auto write_device = [&o] {
    return Json(o.tier ? kOffloadDevices[static_cast<std::size_t>(*o.tier)] : "auto");
  };
  return with_deepspeed_keys(
      {row(kPlanOnly,
           with_values({"device", read_device, write_device}, {"auto", "none", "cpu", "nvme"}),
           texts.device),
       row(kPlanOnly, folders("nvme_path", o.nvme_path), texts.nvme_path),
       row(kPlanOnly, buffers_key(fmt::format("zero_optimization.{}.buffer_count", name), buffers),
           texts.buffer_count)},
      name, log);
}

/// 0 means 1, too: DeepSpeed shards weights over fewer ranks only above 1.
Key hpz_key(ZeroSection& zero) {
  Key key = whole("zero_hpz_partition_size", zero.hpz_partition_size, {0, std::uint64_t{1} << 20U});
  key.read = [read = std::move(key.read), &zero](const Value& value) {
    read(value);
    zero.hpz_partition_size = std::max<std::uint64_t>(1, zero.hpz_partition_size);
  };
  return key;
}

/// Configs for transformers contain "auto", which means the default here.
Key persistence_key(std::string name, ZeroSection& zero) {
  Key key = whole(std::move(name), zero.persistence_threshold, {});
  key.read = [read = std::move(key.read), &zero](const Value& value) {
    if (value.is_auto()) {
      zero.persistence_threshold = 0;
    } else {
      read(value);
    }
  };
  return key;
}

/// Keys that `aio` and the entries of `aio.paths` share.
Section transfer_keys(Bytes& block_size, unsigned& queue_depth, IoBackend& backend) {
  Key block = bytes("block_size", block_size, {kPage, kGiB});
  block.read = [read = std::move(block.read), &block_size](const Value& value) {
    read(value);
    if (block_size % kPage != 0) {
      value.fail(fmt::format("must be a multiple of 4 KiB (4096), got {}", block_size));
    }
  };
  return {
      row(kPlanOnly, std::move(block),
          {"bytes of one I/O request", "1 MiB", "4 KiB to 1 GiB, a multiple of 4 KiB"}),
      row(kPlanOnly, whole("queue_depth", queue_depth, {1, 4096}),
          {"requests in flight per device", "32", "1 to 4096"}),
      row(kPlanOnly, choice("backend", backend),
          {"`auto` takes the first one that works", "`auto`", "`auto`, `io_uring`, `threads`"})};
}

Section path_keys(AioPath& entry) {
  Section keys = transfer_keys(entry.block_size, entry.queue_depth, entry.backend);
  keys.insert(keys.begin(), {"path", [&entry](const Value& value) { entry.path = folder(value); },
                             [&entry] { return Json(entry.path.string()); }});
  keys.push_back(real("read_gbps", entry.read_gbps, kGigabytes));
  keys.push_back(real("write_gbps", entry.write_gbps, kGigabytes));
  return keys;
}

/// Must be read after the keys of `aio` that the entries inherit.
Key paths_key(AioSection& aio) {
  const auto read = [&aio](const Value& value) {
    aio.paths.clear();
    std::vector<Path> seen;
    for (const Value& item : value.elements("an array of objects")) {
      AioPath entry = {.path = {},
                       .block_size = aio.block_size,
                       .queue_depth = aio.queue_depth,
                       .backend = aio.backend};
      read_section(item, path_keys(entry));
      if (entry.path.empty()) item.fail("lacks \"path\"; add it");
      add_folder(item.member("path"), seen);
      aio.paths.push_back(std::move(entry));
    }
  };
  const auto write = [&aio] {
    Json out = Json::array();
    for (AioPath& entry : aio.paths) out.push_back(write_section(path_keys(entry)));
    return out;
  };
  return {"paths", read, write};
}

}  // namespace

Section zero_keys(ZeroSection& zero, step::BufferCounts& buffers, std::vector<std::string>& log) {
  return with_deepspeed_keys(
      {row(kPlanOnly, whole("stage", zero.stage, {0, 3}),
           {"what is sharded over ranks: 1 optimizer states, 2 also gradients, 3 also weights", "0",
            "0 to 3"}),
       row(kPlanOnly, persistence_key("stage3_param_persistence_threshold", zero),
           {"stage 3: blocks with at most this many parameters keep their weights whole on every "
            "rank, see [stage 3](many-cards.md#stage-3). Alias: `param_persistence_threshold`. "
            "DeepSpeed's "
            "default is 1e5 per tensor",
            "0", "0 to 2^53, `\"auto\"` (0)"}),
       row(kPlanOnly, accepted_only(persistence_key("param_persistence_threshold", zero)),
           {"another name of `stage3_param_persistence_threshold`", "", ""}),
       row(kPlanOnly, hpz_key(zero),
           {"stage 3: number of consecutive ranks, usually those of a node, that together hold one "
            "copy of the weights (hpZ), see [stage 3](many-cards.md#stage-3)",
            "1 (or 0): all ranks hold one copy together",
            "0 to 2^20, a divisor of the number of ranks"}),
       row(kResultsAndPlan, flag("zero_quantized_weights", zero.quantized_weights),
           {"stage 3: all-gather 8-bit instead of full weights (qwZ), see [stage "
            "3](many-cards.md#stage-3)",
            "false", "true, false"}),
       row(kPlanOnly,
           or_auto(whole("sub_group_size", zero.sub_group_size, {}), zero.sub_group_size),
           {"maximum number of a block's elements whose optimizer states are fetched, updated and "
            "written back together, in units of 2048, see [sub-groups](memory.md#sub-groups)",
            "`\"auto\"`", "0 to 2^53, `\"auto\"`"}),
       section("offload_optimizer",
               [&] {
                 return offload_keys(zero.optimizer, buffers, "offload_optimizer", kOptimizerTexts,
                                     log);
               }),
       section("offload_param",
               [&] {
                 return offload_keys(zero.parameters, buffers, "offload_param", kParameterTexts,
                                     log);
               })},
      "zero_optimization", log);
}

Section aio_keys(AioSection& aio, std::vector<std::string>& log) {
  Section keys = transfer_keys(aio.block_size, aio.queue_depth, aio.backend);
  keys.push_back(row(kPlanOnly, bytes("in_flight_bytes", aio.in_flight_bytes, {kPage, 64 * kGiB}),
                     {"maximum number of bytes in flight per path", "64 MiB", "4 KiB to 64 GiB"}));
  keys.push_back(
      row(kPlanOnly, real("stall_seconds", aio.stall_seconds, kSeconds),
          {"a request that takes longer causes a warning", "30", "above 0, at most 10^6"}));
  keys.push_back(row(kPlanOnly, real("abandon_seconds", aio.abandon_seconds, kSeconds),
                     {"a request that takes longer fails", "300", "`stall_seconds` to 10^6"}));
  keys.push_back(
      row(kPlanOnly, flag("sqpoll", aio.sqpoll),
          {"io_uring: a kernel thread submits requests. Saves system calls, occupies a core",
           "false", "true, false"}));
  keys.push_back(row(kPlanOnly, flag("iopoll", aio.iopoll),
                     {"io_uring: poll for completions; needs a driver with polling queues", "false",
                      "true, false; not with `buffered`"}));
  keys.push_back(row(kPlanOnly, flag("buffered", aio.buffered),
                     {"go through the page cache, for file systems without direct I/O; slower",
                      "false", "true, false"}));
  keys.push_back(
      row(kPlanOnly, flag("any_file_system", aio.any_file_system),
          {"swap to tmpfs, overlay and network file systems too", "false", "true, false"}));
  keys.push_back(
      row(kPlanOnly, paths_key(aio),
          {"settings of single folders, see [swap folders](nvme.md#swap-folders)", "[]", "list"}));
  return with_deepspeed_keys(std::move(keys), "aio", log);
}

}  // namespace ballast::config
