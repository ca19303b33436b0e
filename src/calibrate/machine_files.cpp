#include "ballast/calibrate/machine_files.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::calibrate {

std::filesystem::path machine_file(std::string_view kind, const std::string& key) {
  std::filesystem::path cache;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg == '/') {
    cache = xdg;
  } else if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    cache = std::filesystem::path(home) / ".cache";
  } else {
    return {};
  }
  return cache / "ballast" / fmt::format("{}-{:016x}.json", kind, fnv1a(key));
}

void make_machine_folder(const std::filesystem::path& file) {
  std::error_code failure;
  std::filesystem::create_directories(file.parent_path(), failure);
  if (failure) {
    throw Error(ErrorCategory::io, "cannot create the directory " + file.parent_path().string(),
                failure.value());
  }
}

Descriptor lock_machine_file(const std::filesystem::path& file) {
  make_machine_folder(file);
  const std::filesystem::path name = file.string() + ".lock";
  Descriptor lock = text::open_file(name, O_RDWR | O_CREAT, ErrorCategory::io);
  while (flock(lock.number(), LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int error_number = errno;
    throw Error(ErrorCategory::io, "cannot lock " + name.string(), error_number);
  }
  return lock;
}

namespace {

using model::ProductAlgorithm;
using text::Json;

ProductAlgorithm read_algorithm(const Json& json, const std::string& where) {
  const auto refuse = [&] {
    throw Error(ErrorCategory::config,
                where + ": expected an array of 8 whole numbers, got " + json.described());
  };
  ProductAlgorithm algorithm = {};
  if (json.elements().size() != algorithm.size()) refuse();
  for (std::size_t i = 0; i < algorithm.size(); ++i) {
    const auto word = json.elements()[i].whole();
    if (!word) refuse();
    algorithm[i] = *word;
  }
  return algorithm;
}

std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}", random());
}

/// Content of a file: {"library": ..., "name": ..., "algorithms": {PRODUCT: [8 numbers], ...}}.
class KeptAlgorithms {
 public:
  explicit KeptAlgorithms(const std::string& library)
      : json_(Json::object(
            {{"library", library}, {"name", random_name()}, {"algorithms", Json::object()}})) {}

  /// Reads the kept choices of `library`. Returns nothing if the file belongs to another library
  /// whose name has the same hash.
  static std::optional<KeptAlgorithms> read(const std::filesystem::path& file,
                                            const std::string& library) {
    const std::string name = file.string();
    KeptAlgorithms choices(text::parse_json(text::read_settings(file, "product algorithms"), name),
                           name);
    const Json* const owner = choices.json_.find("library");
    return owner != nullptr && *owner == library ? std::optional(std::move(choices)) : std::nullopt;
  }

  [[nodiscard]] std::optional<ProductAlgorithm> find(const std::string& product) const {
    const Json* const found = json_.find("algorithms")->find(product);
    return found == nullptr ? std::nullopt : std::optional(read_algorithm(*found, product));
  }
  [[nodiscard]] std::string name() const { return json_.find("name")->text(); }
  /// Whether an older version wrote the file.
  [[nodiscard]] bool was_unnamed() const { return was_unnamed_; }
  void set(const std::string& product, const ProductAlgorithm& algorithm) {
    Json words = Json::array();
    for (const std::uint64_t word : algorithm) words.push_back(word);
    (*json_.find("algorithms"))[product] = std::move(words);
  }
  void write(const std::filesystem::path& file) const {
    text::ReplacedFile replaced(file);
    replaced.write(json_.pretty(2) + "\n");
    replaced.commit();
  }

 private:
  KeptAlgorithms(Json json, const std::string& file) : json_(std::move(json)) {
    const Json* const algorithms = json_.find("algorithms");
    if (algorithms == nullptr || !algorithms->is_object()) {
      throw Error(ErrorCategory::config, file + ": lacks the object \"algorithms\"");
    }
    for (const auto& [product, value, at] : algorithms->members()) {
      static_cast<void>(read_algorithm(value, file + ": " + product));
    }
    const Json* const name = json_.find("name");
    was_unnamed_ = name == nullptr || !name->is_string();
    if (was_unnamed_) json_["name"] = random_name();
  }

  Json json_;
  bool was_unnamed_ = false;
};

class KeptChoices final : public model::ProductChoices {
 public:
  explicit KeptChoices(Unkept unkept) : unkept_(unkept) {}

  std::size_t choose(const std::string& library, const std::string& product,
                     std::span<const ProductAlgorithm> candidates,
                     const std::function<std::size_t()>& time) override {
    const std::filesystem::path file = product_choices_file(library);
    const Descriptor lock = lock_of(file);
    auto choices = read_kept(
        file, "products: cannot use the kept algorithms, timing again",
        [&](const std::filesystem::path& path) { return KeptAlgorithms::read(path, library); });
    if (!choices) choices.emplace(library);
    use("");
    if (!lock.is_open() && unkept_ == Unkept::first) return 0;
    if (lock.is_open() && choices->was_unnamed()) keep(*choices, file);
    if (const auto kept = choices->find(product)) {
      const auto found = std::find(candidates.begin(), candidates.end(), *kept);
      if (found != candidates.end()) {
        use(choices->name());
        return static_cast<std::size_t>(found - candidates.begin());
      }
      log(LogLevel::warning,
          fmt::format("products: cuBLASLt does not offer the kept algorithm of {} any more, timing "
                      "again",
                      product));
    }
    const std::size_t chosen = time();
    choices->set(product, candidates[chosen]);
    if (lock.is_open() && !keep(*choices, file) && unkept_ == Unkept::first) return 0;
    use(lock.is_open() ? choices->name() : unkept_name_);
    return chosen;
  }
  std::string name() const override {
    const std::scoped_lock lock(mutex_);
    return used_;
  }

 private:
  Descriptor lock_of(const std::filesystem::path& file) {
    if (file.empty()) {
      complain("neither XDG_CACHE_HOME nor HOME is an absolute path");
      return {};
    }
    try {
      return lock_machine_file(file);
    } catch (const Error& error) {
      complain(error.what());
      return {};
    }
  }

  void use(const std::string& name) {
    const std::scoped_lock lock(mutex_);
    used_ = name;
  }

  bool keep(const KeptAlgorithms& choices, const std::filesystem::path& file) {
    try {
      choices.write(file);
      return true;
    } catch (const Error& error) {
      complain(error.what());
      return false;
    }
  }

  void complain(std::string_view reason) {
    if (complained_.exchange(true)) return;
    if (unkept_ == Unkept::first) {
      log(LogLevel::info,
          fmt::format("products: not timed, because choices cannot be kept: {}", reason));
      return;
    }
    log(LogLevel::warning,
        fmt::format("products: cannot keep the timed algorithms, so later runs and other ranks may "
                    "have other bits: {}",
                    reason));
  }

  Unkept unkept_;
  std::string unkept_name_ = random_name();
  std::atomic<bool> complained_ = false;
  mutable std::mutex mutex_;
  std::string used_;  ///< name of the choices that the last choose() used
};

}  // namespace

std::shared_ptr<model::ProductChoices> kept_product_choices(Unkept unkept) {
  return std::make_shared<KeptChoices>(unkept);
}

std::filesystem::path product_choices_file(const std::string& library) {
  return machine_file("products", library);
}

model::KernelOptions kernel_options(const engine::KernelRequest& request, bool one_machine) {
  // One object per process, so that calibration and run do not log the same warning twice.
  static const std::shared_ptr<model::ProductChoices> kept = kept_product_choices();
  static const std::shared_ptr<model::ProductChoices> open = kept_product_choices(Unkept::first);
  using Timing = engine::KernelRequest::Timing;
  std::shared_ptr<model::ProductChoices> products;
  if (request.timing == Timing::always) products = kept;
  if (request.timing == Timing::if_kept && one_machine) products = open;
  return {.set = request.set,
          .checks = request.checks,
          .attention = request.attention,
          .products = std::move(products)};
}

}  // namespace ballast::calibrate
