terraform {
  required_version = ">= 1.5"

  required_providers {
    nebius = {
      source  = "nebius/nebius"
      version = ">= 0.6.8, < 0.7.0" # attributes checked against the schema of 0.6.32
    }
  }
}

provider "nebius" {
  # The environment variables that hold the credentials of a service account
  service_account = {
    account_id_env       = "NB_SA_ID"
    public_key_id_env    = "NB_AUTHKEY_PUBLIC_ID"
    private_key_file_env = "NB_AUTHKEY_PRIVATE_PATH"
  }
}
