#include <algorithm>
#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "src/config/sections.h"

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

Section offload_keys(OffloadSection& o, step::BufferCounts& buffers, const std::string& name,
                     std::vector<std::string>& log) {
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
      {with_values({"device", read_device, write_device}, {"auto", "none", "cpu", "nvme"}),
       folders("nvme_path", o.nvme_path),
       buffers_key(fmt::format("zero_optimization.{}.buffer_count", name), buffers)},
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
  return {std::move(block), whole("queue_depth", queue_depth, {1, 4096}),
          choice("backend", backend)};
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
      {whole("stage", zero.stage, {0, 3}),
       persistence_key("stage3_param_persistence_threshold", zero),
       accepted_only(persistence_key("param_persistence_threshold", zero)), hpz_key(zero),
       flag("zero_quantized_weights", zero.quantized_weights),
       or_auto(whole("sub_group_size", zero.sub_group_size, {}), zero.sub_group_size),
       section("offload_optimizer",
               [&] { return offload_keys(zero.optimizer, buffers, "offload_optimizer", log); }),
       section("offload_param",
               [&] { return offload_keys(zero.parameters, buffers, "offload_param", log); })},
      "zero_optimization", log);
}

Section aio_keys(AioSection& aio, std::vector<std::string>& log) {
  Section keys = transfer_keys(aio.block_size, aio.queue_depth, aio.backend);
  keys.push_back(bytes("in_flight_bytes", aio.in_flight_bytes, {kPage, 64 * kGiB}));
  keys.push_back(real("stall_seconds", aio.stall_seconds, kSeconds));
  keys.push_back(real("abandon_seconds", aio.abandon_seconds, kSeconds));
  keys.push_back(flag("sqpoll", aio.sqpoll));
  keys.push_back(flag("iopoll", aio.iopoll));
  keys.push_back(flag("buffered", aio.buffered));
  keys.push_back(flag("any_file_system", aio.any_file_system));
  keys.push_back(paths_key(aio));
  return with_deepspeed_keys(std::move(keys), "aio", log);
}

}  // namespace ballast::config
