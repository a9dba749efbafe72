"""The `args` of the `api` application in a Serve config file, and every environment variable.

YAML -> these pydantic models (unknown keys are errors) -> frozen inward configs such as
EngineConfig. The string below a field is its description: `docs/configuration.md` is generated
from them.
"""

from serve_app.config.environment import FRONT_LIMITS as FRONT_LIMITS
from serve_app.config.environment import KEY_PEPPER as KEY_PEPPER
from serve_app.config.environment import LOG_FORMAT as LOG_FORMAT
from serve_app.config.environment import WEBHOOK_SECRET as WEBHOOK_SECRET
from serve_app.config.environment import artifact_root as artifact_root
from serve_app.config.environment import artifact_schemes as artifact_schemes
from serve_app.config.environment import cache_folder as cache_folder
from serve_app.config.environment import database_url as database_url
from serve_app.config.environment import embedded_uri as embedded_uri
from serve_app.config.environment import environment_with as environment_with
from serve_app.config.environment import front_limits as front_limits
from serve_app.config.environment import log_format as log_format
from serve_app.config.environment import secret as secret
from serve_app.config.environment import tracking_uri as tracking_uri
from serve_app.config.models import FRONT_SETTINGS as FRONT_SETTINGS
from serve_app.config.models import STEP_LIMITS as STEP_LIMITS
from serve_app.config.models import AutoscalingArgs as AutoscalingArgs
from serve_app.config.models import EngineArgs as EngineArgs
from serve_app.config.models import MigrationArgs as MigrationArgs
from serve_app.config.models import ModelArgs as ModelArgs
from serve_app.config.models import RouterArgs as RouterArgs
from serve_app.config.models import base_name as base_name
from serve_app.config.platform import OTLP_EXPORTER as OTLP_EXPORTER
from serve_app.config.platform import CanaryArgs as CanaryArgs
from serve_app.config.platform import FairnessArgs as FairnessArgs
from serve_app.config.platform import IngressArgs as IngressArgs
from serve_app.config.platform import LoggingArgs as LoggingArgs
from serve_app.config.platform import MetricsArgs as MetricsArgs
from serve_app.config.platform import PlatformArgs as PlatformArgs
from serve_app.config.platform import RegistryArgs as RegistryArgs
from serve_app.config.platform import RequestLogArgs as RequestLogArgs
from serve_app.config.platform import TracesArgs as TracesArgs
from serve_app.config.platform import check_routers as check_routers
from serve_app.config.tenancy import OidcArgs as OidcArgs
from serve_app.config.tenancy import PriceArgs as PriceArgs
from serve_app.config.tenancy import TenancyArgs as TenancyArgs
from serve_app.config.values import close_match as close_match
from serve_app.config.values import in_words as in_words
from serve_app.config.values import schemas_of as schemas_of
from serve_app.home import ADMIN_TOKEN as ADMIN_TOKEN
from serve_app.home import default_home as default_home
