// Stands for a package that @kya-os/checkpoint-shared needs and npm does not have. The identity schema uses none of it.
import { z } from "zod";

const anything = z.object({});
const ignore = () => {};
export const AUTH_MODES = {};
export const PROVIDER_AUTH_TYPES = {};
export {
  anything as CredentialProviderConfigSchema,
  anything as OAuthProviderConfigSchema,
  anything as ProviderConfigSchema,
  anything as ProviderDefinitionSchema,
  ignore as validateProviderConfig,
  ignore as validateProviderDefinition,
};
